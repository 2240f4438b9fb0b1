"""One MoE layer on CPU in several quantization schemes, beside the same layer in bf16, in one process.

Run: python benchmarks/quantized_cpu.py        (no accelerator needed; --help lists the sizes)

Every round runs all schemes, so that a change of the machine's load meets all of them; the ratio is the median over
rounds of a scheme's time to bf16's in the same round, the time is the smallest. `--clock cpu` with one thread counts
CPU time instead of time on the wall: the choice on a shared machine. The last column is the largest memory that a
forward held beyond the stored weights and its input.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from moe_core import LayerRequest, MoELayer, RawWeights
from moe_core.payloads import Tensor
from moe_core.quant import SCHEMES, LayerQuant, QuantScheme
from moe_core.weights.expected import expected_tensors

_BASELINE = "bf16"
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_DEFAULT = ("w8a8_int8", "w4a8_int8", "fp8_block128", "mxfp8", "mxfp4_w4a16", "nvfp4", "nvfp4_w4a16")


def _random_tensors(request: LayerRequest) -> dict[str, Tensor]:
    """Stored codes and scales; every expert holds the same numbers in memory of its own, which is quick to make."""
    tensors = {}
    for name, expected in expected_tensors(request, request.num_experts).items():
        shape, dtype = expected.shape[1:], expected.dtypes[0]
        if "scale" in name:
            one = torch.full(shape, 115.0) if dtype == torch.uint8 else torch.rand(shape) / 1e4 + 1e-4
        elif dtype in (torch.int8, torch.uint8):
            one = torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, shape)
        else:
            one = torch.randn(shape) / 50
        tensors[name] = one.to(dtype).expand(expected.shape).contiguous()
    return tensors


def _layer(scheme: QuantScheme, experts: int, top_k: int, hidden: int, intermediate: int) -> MoELayer:
    request = LayerRequest(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=intermediate,
        quant=LayerQuant.of(scheme),
        runner_backend="torch",
    )
    layer = MoELayer(request)
    layer.load_weights(RawWeights(tensors=_random_tensors(request), handed_over=True))
    return layer


def peak_bytes(run: Callable[[], object]) -> int:
    """The largest number of bytes on CPU that `run` held beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes), default=0)


def _milliseconds(
    layers: dict[str, MoELayer], inputs: tuple[Tensor, ...], clock: Callable[[], float], rounds: int
) -> dict[str, list[float]]:
    """One time per layer and round; the first round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in layers}
    for index in range(rounds + 1):
        for name, layer in layers.items():
            begin = clock()
            layer(*inputs)
            if index:
                samples[name].append((clock() - begin) * 1e3)
    return samples


def main(
    schemes: Annotated[list[str] | None, typer.Option(help="Names of schemes to measure beside bf16.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Token counts; default 1, 16, 128.")] = None,
    experts: int = 128,
    top_k: int = 8,
    hidden: int = 2048,
    intermediate: int = 768,
    threads: int = 2,
    clock: Annotated[str, typer.Option(help="wall or cpu (use with one thread).")] = "wall",
    rounds: Annotated[int, typer.Option(help="Rounds per token count.")] = 15,
) -> None:
    """Print the smallest time of a forward, the median ratio to bf16, and the largest memory."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    names = (_BASELINE, *(schemes or _DEFAULT))
    layers = {name: _layer(SCHEMES[name], experts, top_k, hidden, intermediate) for name in names}
    table = Table(
        "T", "scheme", "ms (smallest)", "times bf16 (median)", "MB held", title=f"{experts} experts, top-{top_k}"
    )
    for count in tokens or [1, 16, 128]:
        ids = torch.rand(count, experts).topk(top_k).indices
        inputs = torch.randn(count, hidden).bfloat16(), ids, torch.rand(count, top_k).softmax(-1)
        samples = _milliseconds(layers, inputs, _CLOCKS[clock], rounds)
        for name, layer in layers.items():
            ratio = statistics.median(a / b for a, b in zip(samples[name], samples[_BASELINE], strict=True))
            held = peak_bytes(partial(layer, *inputs)) / 1e6
            table.add_row(str(count), name, f"{min(samples[name]):.1f}", f"{ratio:.2f}", f"{held:.1f}")
        table.add_section()
    one_expert = 4 * 3 * hidden * intermediate / 1e6
    table.caption = (
        f"H {hidden}, I {intermediate}: one expert in fp32 is {one_expert:.1f} MB; {threads} thread(s), {clock} time"
    )
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
