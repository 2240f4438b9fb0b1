"""One unquantized MoE layer on an NVIDIA GPU: moe-core's runners beside transformers' grouped_mm, in one process.

Run: python benchmarks/gpu_layer.py        (needs an NVIDIA GPU; --help lists the sizes)

Every implementation is captured in a CUDA graph of several calls, whose routings differ, so that no call finds its
weights in the cache; a figure is the median of the replays, divided by the calls. Outputs are compared first: with a
layer in fp32 and, bit by bit, with the same call outside a graph.

The floor of a row is the larger of two times: reading the active experts' weights once at the bandwidth measured in
this run, and the multiplications at the rate of a large bf16 product measured in this run.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_core import LayerRequest, MoELayer, RawWeights

#: (experts, top-k, hidden size, intermediate size)
SHAPES = {
    "128x8": (128, 8, 2048, 768),
    "256x8": (256, 8, 7168, 2048),
    "8x2": (8, 2, 4096, 14336),
    "512x10": (512, 10, 4096, 1024),
}
#: Error of the result's norm: bf16 operands of both GEMMs, activation and output are rounded once each.
TOLERANCE = 8e-3
_CONSOLE = Console(width=130)

Call = Callable[[int], torch.Tensor]


class Case:
    """Weights of one shape, and tokens with several routings."""

    def __init__(self, shape: tuple[int, int, int, int], weights: dict[str, torch.Tensor], tokens: int) -> None:
        self.experts, self.top_k, self.hidden, self.inner = shape
        self.weights = weights
        self.num_sets = 16 if tokens == 1 else 4 if tokens <= 256 else 2
        scores = torch.rand(self.num_sets, tokens, self.experts, device="cuda")
        self.ids = scores.topk(self.top_k, dim=-1).indices
        self.router = torch.rand(self.num_sets, tokens, self.top_k, device="cuda") + 0.1
        self.rows = torch.randn(self.num_sets, tokens, self.hidden, device="cuda").bfloat16()

    def floor(self, bytes_per_us: float, flops_per_us: float) -> float:
        """Microseconds that no implementation can be much below."""
        per_expert = 3 * self.hidden * self.inner
        active = sum(ids.unique().numel() for ids in self.ids) / self.num_sets
        slots = self.ids[0].numel()
        return max(active * per_expert * 2 / bytes_per_us, slots * per_expert * 2 / flops_per_us)

    def exact(self, index: int) -> torch.Tensor:
        """The result of one set in fp32, expert by expert."""
        rows, out = self.rows[index].float(), torch.zeros_like(self.rows[index], dtype=torch.float64)
        for expert in self.ids[index].unique().tolist():
            token, slot = torch.where(self.ids[index] == expert)
            gate, up = (rows[token] @ self.weights["w13"][expert].float().T).chunk(2, dim=-1)
            result = (torch.nn.functional.silu(gate) * up) @ self.weights["w2"][expert].float().T
            out.index_add_(0, token, result.double() * self.router[index][token, slot, None].double())
        return out


def make_weights(shape: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
    """Random canonical weights, gate and up of different size, filled expert by expert."""
    experts, _, hidden, inner = shape
    w13 = torch.empty(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16)
    w2 = torch.empty(experts, hidden, inner, device="cuda", dtype=torch.bfloat16)
    for expert in range(experts):
        w13[expert].normal_(std=hidden**-0.5)
        w13[expert, inner:] *= 1.7
        w2[expert].normal_(std=inner**-0.5)
    return {"w13": w13, "w2": w2}


def implementations(case: Case) -> dict[str, Call]:
    """Name -> call of one set."""
    found: dict[str, Call] = {}
    for runner in ("triton", "torch"):
        request = LayerRequest(
            num_experts=case.experts,
            top_k=case.top_k,
            hidden_size=case.hidden,
            intermediate_size=case.inner,
            runner_backend=runner,
        )
        layer = MoELayer(request)
        layer.load_weights(RawWeights(tensors=dict(case.weights), handed_over=True))
        found[f"moe-core {runner}"] = lambda i, layer=layer: layer(case.rows[i], case.ids[i], case.router[i])  # type: ignore[misc]
    module = _experts_module(case)
    # Its models bring router weights in the layer's dtype.
    router = case.router.bfloat16()
    found["transformers grouped_mm"] = lambda i: grouped_mm_experts_forward(
        module, case.rows[i], case.ids[i], router[i]
    )
    return found


def _experts_module(case: Case) -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(
        num_experts=case.experts,
        hidden_size=case.hidden,
        moe_intermediate_size=case.inner,
        experts_implementation="grouped_mm",
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj = torch.nn.Parameter(case.weights["w13"], requires_grad=False)
    module.down_proj = torch.nn.Parameter(case.weights["w2"], requires_grad=False)
    return module


def microseconds(calls: Sequence[Callable[[], object]], repeats: int) -> tuple[float, list[Any]]:
    """Median time per call of a graph of all `calls`, and what they returned in the last replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:]), outputs


def bandwidth() -> float:
    """Bytes per microsecond: the better of a copy and a plain read."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    copied, _ = microseconds([lambda: target.copy_(source)] * 3, 5)
    read, _ = microseconds([lambda: source.view(1 << 10, -1).amax(dim=1)] * 3, 5)
    size = source.numel() * source.element_size()
    return max(2 * size / copied, size / read)


def matmul_rate() -> float:
    """bf16 operations per microsecond of a large product."""
    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product, _ = microseconds([lambda: left @ right] * 4, 5)
    return 2 * 8192**3 / product


def measure(case: Case, name: str, call: Call, want: torch.Tensor | None, repeats: int) -> float:
    """Microseconds per call, after a look at the numbers."""
    eager = [call(index).clone() for index in range(case.num_sets)]
    time, outputs = microseconds([lambda i=i: call(i) for i in range(case.num_sets)], repeats)
    if want is not None:
        error = float((eager[0].double() - want).norm() / want.norm())
        if not error < TOLERANCE:
            raise ValueError(f"{name}: relative error {error:.2e}")
    if name.startswith("moe-core") and not all(map(torch.equal, eager, outputs)):
        raise ValueError(f"{name}: a captured call gives other bits")
    return time


def main(
    shapes: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = ",".join(SHAPES),
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "1,16,64,256,2048,8192",
    repeats: Annotated[int, typer.Option(help="Replays per figure.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where figures go besides the table.")] = None,
) -> None:
    """Measure and print one table."""
    torch.manual_seed(0)
    bytes_per_us, flops_per_us = bandwidth(), matmul_rate()
    torch.cuda.empty_cache()
    caption = (
        f"{torch.cuda.get_device_name()}, Python {platform.python_version()}, torch {torch.__version__}, triton "
        f"{version('triton')}, transformers {version('transformers')}; "
        f"{bytes_per_us / 1e6:.2f} TB/s, {flops_per_us / 1e6:.0f} TFLOP/s"
    )
    table = Table("experts x top-k, H, I", "T", "floor", title="us per layer, bf16", caption=caption)
    figures: list[dict[str, Any]] = []
    for name in shapes.split(","):
        weights = make_weights(SHAPES[name])
        for count in map(int, tokens.split(",")):
            case = Case(SHAPES[name], weights, count)
            want = case.exact(0) if count <= 256 else None
            row = {"shape": name, "tokens": count, "floor": case.floor(bytes_per_us, flops_per_us)}
            for label, call in implementations(case).items():
                try:
                    row[label] = measure(case, label, call, want, repeats)
                except (RuntimeError, ValueError) as error:
                    row[label] = str(error).splitlines()[0]
            figures.append(row)
            print(json.dumps(row), flush=True)
            if json_file is not None:
                json_file.write_text(json.dumps({"caption": caption, "rows": figures}, indent=1), encoding="utf-8")
        del weights, case, want
        torch.cuda.empty_cache()
    for label in list(figures[0])[3:]:
        table.add_column(label, justify="right")
    for row in figures:
        values = list(row.values())
        size = f"{row['shape']}, {', '.join(map(str, SHAPES[row['shape']][2:]))}"
        table.add_row(size, str(row["tokens"]), *(f"{v:.0f}" if isinstance(v, float) else str(v) for v in values[2:]))
    _CONSOLE.print(table)


if __name__ == "__main__":
    typer.run(main)
