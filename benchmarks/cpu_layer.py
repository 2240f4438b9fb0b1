"""One unquantized MoE layer on CPU: the built-in experts beside transformers' implementations, in one process.

Run: python benchmarks/cpu_layer.py        (no accelerator needed; --help lists the sizes)

Runs are interleaved, so that a change of the machine's load meets all of them. `--clock cpu` with one thread counts
CPU time instead of time on the wall: the choice on a shared machine.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn import functional
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_core.activation import SWIGLU
from moe_core.kernels.activation import activation_function
from moe_core.kernels.expert_weights import ExpertLinear, Experts
from moe_core.kernels.experts import experts_standard
from moe_core.quant import QuantScheme

_OURS, _FLOOR = "moe-core", "floor"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
#: Most tokens for which copying every slot's weights (batched_mm) is worth measuring.
_BATCHED_LIMIT = 16


def _experts_module(experts: int, hidden: int, intermediate: int, dtype: torch.dtype) -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(
        num_experts=experts, hidden_size=hidden, moe_intermediate_size=intermediate, experts_implementation="eager"
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module = module.to(dtype).to_empty(device="cpu").requires_grad_(False)
    for parameter in module.parameters():
        for expert in parameter:
            expert.normal_(std=0.02)
    return module


def _bare_gemms(module: Qwen3MoeExperts, x: torch.Tensor, ids: torch.Tensor) -> Callable[[], object]:
    """Only one `linear` call per active expert and projection, rows gathered beforehand."""
    counts = torch.bincount(ids.flatten(), minlength=module.num_experts).tolist()
    width = module.down_proj.shape[2]
    work = [
        (module.gate_up_proj[e], module.down_proj[e], x[:1].repeat(n, 1), x.new_ones((n, width)))
        for e, n in enumerate(counts)
        if n
    ]
    return lambda: [(functional.linear(a, w13), functional.linear(b, w2)) for w13, w2, a, b in work]


def _candidates(
    module: Qwen3MoeExperts, scheme: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> dict[str, Callable[[], object]]:
    def linear(weight: torch.Tensor) -> ExpertLinear:
        return ExpertLinear.of(QuantScheme.from_name(scheme), weight)

    bound = Experts(
        w13=linear(module.gate_up_proj), w2=linear(module.down_proj), activation=activation_function(SWIGLU)
    )
    runs: dict[str, Callable[[], object]] = {
        _OURS: lambda: experts_standard(x, ids, weights, bound),
        "transformers eager": lambda: module(x, ids, weights),
        "transformers grouped_mm": lambda: grouped_mm_experts_forward(module, x, ids, weights),
    }
    if x.shape[0] <= _BATCHED_LIMIT:
        runs["transformers batched_mm"] = lambda: batched_mm_experts_forward(module, x, ids, weights)
    runs["bare per-expert GEMMs"] = _bare_gemms(module, x, ids)
    return runs


def _interleaved(runs: dict[str, Callable[[], object]], clock: Callable[[], float], seconds: float) -> dict[str, float]:
    """Median milliseconds of each run; at least three rounds."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(samples[_OURS]) < 3:
        for name, run in runs.items():
            begin = clock()
            run()
            samples[name].append((clock() - begin) * 1e3)
    return {name: statistics.median(times) for name, times in samples.items()}


def _machine_rates(weight: torch.Tensor, clock: Callable[[], float]) -> tuple[float, float]:
    """Bytes per second of reading weights, and FLOP per second of a large fp32 GEMM."""
    words = weight.view(torch.int32)
    square = torch.ones((1024, 1024))
    work: list[tuple[int, Callable[[], object]]] = [
        (weight.nbytes, lambda: words.amax()),
        (2 * 1024**3, lambda: square @ square),
    ]
    rates: list[float] = []
    for amount, run in work:
        times = []
        for _ in range(5):
            begin = clock()
            run()
            times.append(clock() - begin)
        rates.append(amount / min(times))
    return rates[0], rates[1]


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main(
    tokens: Annotated[list[int] | None, typer.Option(help="Token counts; default 1, 16, 128, 1024.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp32 or fp16.")] = "bf16",
    experts: int = 128,
    top_k: int = 8,
    hidden: int = 2048,
    intermediate: int = 768,
    threads: int = 2,
    clock: Annotated[str, typer.Option(help="wall or cpu (use with one thread).")] = "wall",
    seconds: Annotated[float, typer.Option(help="Measuring time per token count.")] = 5.0,
) -> None:
    """Print median times per forward and their ratio to moe-core's."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module = _experts_module(experts, hidden, intermediate, _DTYPES[dtype])
    bandwidth, flops = _machine_rates(module.gate_up_proj, _CLOCKS[clock])
    table = Table("T", "implementation", "ms", "times moe-core", title=f"{dtype}, {experts} experts, top-{top_k}")
    for count in tokens or [1, 16, 128, 1024]:
        x = torch.randn(count, hidden).to(_DTYPES[dtype])
        ids = torch.rand(count, experts).topk(top_k).indices
        weights = torch.rand(count, top_k).softmax(-1)
        with torch.no_grad():
            times = _interleaved(_candidates(module, dtype, x, ids, weights), _CLOCKS[clock], seconds)
        per_expert = 3 * hidden * intermediate
        read = len(set(ids.flatten().tolist())) * per_expert * module.gate_up_proj.itemsize / bandwidth
        times[_FLOOR] = max(read, 2 * count * top_k * per_expert / flops) * 1e3
        for name, value in times.items():
            table.add_row(str(count), name, f"{value:.2f}", f"{value / times[_OURS]:.2f}")
        table.add_section()
    table.caption = (
        f"H {hidden}, I {intermediate}; median {clock} time; {_cpu_name()}, {threads} thread(s); "
        f"torch {version('torch')}, transformers {version('transformers')}; floor: the larger of reading the active "
        f"experts at {bandwidth / 1e9:.1f} GB/s and multiplying at {flops / 1e9:.0f} GFLOP/s (fp32), as measured now"
    )
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
