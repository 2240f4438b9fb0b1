"""What the core itself costs: importing it, its commands, resolving, the layer around its bound functions, and loading.

Times are CPU times, the smallest of several runs: other work on the machine makes them longer, nothing makes them
shorter. By the clock a forward of 5 us took 18 to 79 on a machine that had more to do than it has cores.

Run: python benchmarks/core.py        (no accelerator needed)
"""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from moe_core import LayerRequest, MoELayer, RawWeights, default_manager, load_environment, make_plan, plan_layers
from moe_core.quant import BF16, FP8_BLOCK128, LayerQuant
from moe_core.tuning.timing import measure, prepare, take_turns


def import_milliseconds(module: str, repeats: int = 9) -> float:
    """CPU time of an import in a fresh interpreter, without the interpreter's own start."""
    code = f"import time; t = time.process_time(); import {module}; print((time.process_time() - t) * 1e3)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(repeats)
    ]
    return min(float(run.stdout) for run in runs)


def command_milliseconds(*words: str, repeats: int = 5) -> float:
    """CPU time of a command as a whole process."""
    code = "from moe_core.cli.app import main; main()"
    took = []
    for _ in range(repeats):
        before = _seconds_of_children()
        subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=True)
        took.append(_seconds_of_children() - before)
    return min(took) * 1e3


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def plan_milliseconds(distinct: bool, quant: LayerQuant, num_layers: int = 61, repeats: int = 15) -> float:
    """CPU time to plan every layer of a 256-expert model; distinct layers differ in one size."""
    manager, environment = default_manager(), load_environment("h100")
    requests = {
        f"layers.{index}": LayerRequest(
            num_experts=256,
            top_k=8,
            hidden_size=7168,
            intermediate_size=2048 + (8 * index if distinct else 0),
            quant=quant,
        )
        for index in range(num_layers)
    }
    timing = measure([lambda: plan_layers(manager, requests, environment)], "cpu", repeats=repeats, clock="cpu")
    return timing.smallest / 1e3


def plan_one_milliseconds(hidden_size: int, repeats: int = 15) -> float:
    """CPU time to plan a layer by itself, as each `MoELayer` does; at a hidden size of 2048 it was measured."""
    manager, environment = default_manager(), load_environment("h100")
    request = LayerRequest(num_experts=128, top_k=8, hidden_size=hidden_size, intermediate_size=768)
    timing = measure([lambda: make_plan(manager, request, environment)], "cpu", repeats=repeats, clock="cpu")
    return timing.smallest / 1e3


def overhead_microseconds(repeats: int = 25, calls: int = 400) -> tuple[float, float]:
    """CPU times at T = 1 of `MoELayer.forward`, and of its bound functions called by hand, interleaved.

    The functions return at once, since the spread of real experts would hide the difference.
    """
    layer, _ = make_layer(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)
    bound = layer._bound.routes[0]
    bound.dispatch = lambda hidden_states, topk_ids, topk_weights: (hidden_states, None)
    bound.experts = lambda dispatched: dispatched
    bound.combine = lambda rows, handle: rows
    hidden_states = torch.randn(1, 64, dtype=torch.bfloat16)
    topk_ids, topk_weights = torch.tensor([[1, 5]]), torch.tensor([[0.75, 0.25]])

    def by_hand() -> torch.Tensor:
        dispatched, handle = bound.dispatch(hidden_states, topk_ids, topk_weights)
        return bound.combine(bound.experts(dispatched), handle)

    def through_layer() -> torch.Tensor:
        return layer(hidden_states, topk_ids, topk_weights)

    ready = {call.__name__: prepare([call] * calls, "cpu", clock="cpu") for call in (through_layer, by_hand)}
    timings = take_turns(ready, repeats)
    return timings["through_layer"].smallest, timings["by_hand"].smallest


def load_peak_ratio() -> tuple[float, float]:
    """Peak resident memory while a layer is loaded, and while it is loaded again, over the checkpoint's bytes."""
    tensors = make_tensors(num_experts=32, hidden_size=2048, intermediate_size=768)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    layer = MoELayer(make_request(32, 2048, 768, 8), device="cpu")
    first = _peak_growth(lambda: layer.load_weights(RawWeights(tensors=tensors)))
    again = _peak_growth(lambda: layer.load_weights(RawWeights(tensors=tensors)))
    return first / size, again / size


def make_request(num_experts: int, hidden_size: int, intermediate_size: int, top_k: int) -> LayerRequest:
    """A bf16 layer."""
    return LayerRequest(
        num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, intermediate_size=intermediate_size
    )


def make_tensors(num_experts: int, hidden_size: int, intermediate_size: int) -> dict[str, torch.Tensor]:
    """Random canonical bf16 weights."""
    return {
        "w13": torch.randn(num_experts, 2 * intermediate_size, hidden_size, dtype=torch.bfloat16),
        "w2": torch.randn(num_experts, hidden_size, intermediate_size, dtype=torch.bfloat16),
    }


def make_layer(num_experts: int, hidden_size: int, intermediate_size: int, top_k: int) -> tuple[MoELayer, RawWeights]:
    """A loaded layer and its weights."""
    layer = MoELayer(make_request(num_experts, hidden_size, intermediate_size, top_k), device="cpu")
    weights = RawWeights(tensors=make_tensors(num_experts, hidden_size, intermediate_size))
    layer.load_weights(weights)
    return layer, weights


def _peak_growth(function: Callable[[], object]) -> int:
    """Bytes by which the resident set grew at most while `function` ran, sampled every millisecond."""
    before, peak, done = _resident(), _resident(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    function()
    done.set()
    watcher.join()
    return max(peak, _resident()) - before


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    """Measure everything and print one table."""
    torch.set_num_threads(1)
    caption = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one thread"
    table = Table("what", "figure", "target", title="What the core costs", caption=caption)
    ours, torchs = import_milliseconds("moe_core"), import_milliseconds("torch")
    table.add_row("import moe_core / import torch", f"{ours:.1f} / {torchs:.0f} ms", "under a tenth")
    for words in ("list-backends", "resolve", "resolve --environment h100"):
        table.add_row(f"moe-core {words}", f"{command_milliseconds(*words.split()):.0f} ms", "-")
    for distinct, what in ((False, "plan 61 equal layers, 256 experts"), (True, "plan 61 distinct layers")):
        bf16, fp8 = (plan_milliseconds(distinct, LayerQuant.of(scheme)) for scheme in (BF16, FP8_BLOCK128))
        table.add_row(f"{what}: bf16 / fp8", f"{bf16:.1f} / {fp8:.1f} ms", "under 50 ms")
    measured, not_measured = plan_one_milliseconds(2048), plan_one_milliseconds(2176)
    table.add_row("plan one layer: measured / not measured", f"{measured:.1f} / {not_measured:.1f} ms", "-")
    through_layer, by_hand = overhead_microseconds()
    figure = f"{through_layer - by_hand:.1f} us ({through_layer:.1f} - {by_hand:.1f})"
    table.add_row("MoELayer.forward - bound functions, T = 1", figure, "at most 10 us")
    first, again = load_peak_ratio()
    table.add_row("peak memory of load + prepare / checkpoint", f"{first:.2f}", "at most 1.5 (own copy, one expert)")
    table.add_row("peak memory of a reload / checkpoint", f"{again:.2f}", "about 0")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
