"""Runner deep_gemm on one NVIDIA GPU: the conformance kit on the real kernels, then times of whole layers.

Run: PYTHONPATH=.:plugins/cuda_deepgemm:SITE python benchmarks/gpu_deepgemm.py     (SITE holds deep_gemm)

Kernels are compiled by processes side by side, those of the kit and one for each layer; their cache on disk is what the
times start from. A time is that of replayed CUDA graphs of a whole layer, dispatch and combine included, beside the two
GEMMs alone on rows that were permuted before. Every layer's output is compared with the layer in fp32, as called and as
replayed. On a CPU the script runs on tiny layers over the emulated library of the plugin's tests, to be tried out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import torch
from moe_plugin_deepgemm import plugin
from moe_plugin_deepgemm.experts import DeepGemmExperts
from moe_plugin_deepgemm.library import CALLS, deep_gemm, parameters

from moe_core.backends.torch import plugin as torch_plugin
from moe_core.backends.triton import plugin as triton_plugin
from moe_core.bench.reference import Reference, tolerance
from moe_core.environment import PRESETS, probe_environment
from moe_core.kernels import ops
from moe_core.layer import MoELayer
from moe_core.manager import BackendManager
from moe_core.payloads import RawWeights, Tensor
from moe_core.quant import BF16, FP8_BLOCK128, LayerQuant
from moe_core.request import LayerRequest, Workload
from moe_core.testing import Kit
from moe_core.tuning.layers import Batches, random_weights
from moe_core.tuning.timing import prepare, take_turns

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
#: E, K, H, I.
LAYERS = ((128, 8, 2048, 768), (256, 8, 7168, 2048), (8, 2, 4096, 14336), (512, 10, 4096, 1024))
TOKENS = {"contiguous": (8192,), "masked": (16, 64, 256)}
if not ON_GPU:
    LAYERS, TOKENS = ((4, 2, 128, 128),), {"contiguous": (64,), "masked": (8,)}
SCHEMES = {"bf16": BF16, "fp8": FP8_BLOCK128}
#: Runners of the kit: one process for each.
RUNNERS = tuple(f"{dtype}_{format_}" for dtype in SCHEMES for format_ in TOKENS)
#: Seconds after which processes of the kit begin no further check, and after which all are stopped.
KIT_SECONDS, MOST_SECONDS = 75, 110


def manager() -> BackendManager:
    """The plugin and the built-in ones, installed or not."""
    found = BackendManager()
    for name, module in (("torch", torch_plugin), ("triton", triton_plugin), ("cuda_deepgemm", plugin)):
        found.register(name, module)
    return found


def layer_of(request: LayerRequest, weights: dict[str, Tensor], num_tokens: int, a2a: str, runner: str) -> MoELayer:
    """One combination, bound."""
    plugins = manager()
    machine = probe_environment(plugins.modules_required()) if ON_GPU else PRESETS["h100"]
    pinned = attrs.evolve(
        request, a2a_backend=a2a, runner_backend=runner, workloads=Workload(max_tokens=num_tokens, graph_capture=True)
    )
    layer = MoELayer(pinned, environment=machine, manager=plugins)
    layer.load_weights(RawWeights(tensors=dict(weights), handed_over=True))
    return layer


def combinations(dtype: str, format_: str) -> dict[str, tuple[str, str]]:
    """Name -> pins of dispatcher and runner."""
    found = {"deep_gemm": (f"none.{format_}", f"deep_gemm.{dtype}_{format_}")}
    return {**found, "triton": ("none", "triton.fused")} if ON_GPU else found


def request_of(sizes: tuple[int, ...], dtype: str) -> LayerRequest:
    """The layer without pins."""
    experts, top_k, hidden, inner = sizes
    return LayerRequest(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=inner,
        dtype="bf16",
        quant=LayerQuant.of(SCHEMES[dtype]),
    )


def gemms_alone(layer: MoELayer, arguments: tuple[Tensor, Tensor, Tensor]) -> Any:
    """The two library calls of a layer on rows that lie where they are wanted: what everything around them adds to."""
    bound = layer._bound.routes[0]  # type: ignore[union-attr]
    experts = bound.experts
    assert isinstance(experts, DeepGemmExperts)
    tokens, _ = bound.dispatch(*arguments)
    inputs = []
    record = attrs.evolve(experts, w13=_Recorded(experts.w13, inputs), w2=_Recorded(experts.w2, inputs))
    record(tokens)
    (first, groups), (second, _) = inputs

    def call() -> Tensor:
        experts.w13(first, groups)
        return experts.w2(second, groups)

    return call


def without_tail(layer: MoELayer, arguments: tuple[Tensor, Tensor, Tensor]) -> str:
    """Whether the library takes ends of groups in place of an expert per row, and what that saves: rows past the last.

    Of interest while the number of rows is a bound that no routing exceeds.
    """
    bound = layer._bound.routes[0]  # type: ignore[union-attr]
    tokens, _ = bound.dispatch(*arguments)
    rows = tokens.hidden_states
    of_rows = ops.row_experts(tokens.num_tokens_per_expert, tokens.group_ends, rows.shape[0])
    by_row: dict[str, Any] = {"grouped_layout": of_rows}
    by_end = {"grouped_layout": tokens.group_ends, "use_psum_layout": True}
    first, codes = bound.experts.w13, bound.experts.codes
    operand = rows if codes is None else ops.quantize(rows, codes, real=of_rows)
    try:
        same = torch.equal(first(operand, by_row)[of_rows >= 0], first(operand, by_end)[of_rows >= 0])
    except (RuntimeError, TypeError) as error:
        return f"not taken: {str(error).splitlines()[0]}"
    calls = {"by row": by_row, "by end": by_end}
    times = take_turns({name: prepare([lambda g=g: first(operand, g)] * 4, DEVICE) for name, g in calls.items()}, 7)
    return f"same rows: {same}; us { ({name: round(timing.microseconds, 1) for name, timing in times.items()}) }"


@attrs.frozen(eq=False)
class _Recorded:
    """A projection that keeps what it was given."""

    projection: Any
    inputs: list[Any]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.projection.shape  # type: ignore[no-any-return]

    def __call__(self, rows: Any, groups: dict[str, Any]) -> Tensor:
        self.inputs.append((rows, groups))
        return self.projection(rows, groups)  # type: ignore[no-any-return]


def measure(sizes: tuple[int, ...], dtype: str) -> Iterator[dict[str, Any]]:
    """The rows of one layer."""
    request = request_of(sizes, dtype)
    weights = random_weights(request, DEVICE)
    for format_, counts in TOKENS.items():
        for num_tokens in counts:
            batches = Batches.random(request, num_tokens, DEVICE)
            reference = Reference(request, weights, batches.one(0))
            ready, errors = {}, {}
            for name, pins in combinations(dtype, format_).items():
                layer = layer_of(request, weights, num_tokens, *pins)
                errors[name] = [reference.error(layer(*batches.one(0)))]
                ready[name] = prepare(batches.calls(layer), DEVICE)
                ready[name].sample()
                errors[name] += [reference.error(output) for output in ready[name].outputs[:1]]
                if name == "deep_gemm":
                    alone = [gemms_alone(layer, batches.one(index)) for index in range(batches.num_sets)]
                    ready["GEMMs alone"] = prepare(alone, DEVICE)
                    if ON_GPU and format_ == "contiguous" and sizes == LAYERS[0]:
                        print(f"ends of groups, {dtype}: {without_tail(layer, batches.one(0))}", flush=True)
            times = take_turns(ready, repeats=9, seconds=1.5)
            yield {
                "layer": sizes,
                "weights": dtype,
                "format": format_,
                "T": num_tokens,
                "us": {name: round(timing.microseconds, 1) for name, timing in times.items()},
                "spread": {name: round(timing.spread, 3) for name, timing in times.items()},
                "error": {name: [float(f"{e:.2g}") for e in found] for name, found in errors.items()},
                "right": all(e < tolerance(request) for found in errors.values() for e in found),
            }
            del ready, layer, alone
            if ON_GPU:
                torch.cuda.empty_cache()


def compile_layer(index: int) -> None:
    """Meet every size of one layer that will be timed."""
    for dtype in SCHEMES:
        request = request_of(LAYERS[index], dtype)
        weights = random_weights(request, DEVICE)
        for format_, counts in TOKENS.items():
            for num_tokens in counts:
                for pins in combinations(dtype, format_).values():
                    layer_of(request, weights, num_tokens, *pins)(*Batches.random(request, num_tokens, DEVICE).one(0))
        del weights


def run_kit(runner: str) -> None:
    """The kit on one runner; one line, and one for each failure."""
    start, tally = time.monotonic(), {}
    kit = Kit(plugin, quick=True, **({} if ON_GPU else {"environment": PRESETS["h100"], "device": "cpu"}))
    cases = [case for case in kit.cases() if f"deep_gemm.{runner}," in str(case)]
    for case in cases:
        if time.monotonic() - start > KIT_SECONDS:
            break
        result = case.run()
        tally[result.status] = tally.get(result.status, 0) + 1
        if result.status == "failed":
            print(f"FAILED {case}: {result.text}", flush=True)
    print(f"kit {runner}: {tally} of {len(cases)} cases in {time.monotonic() - start:.0f} s", flush=True)


def side_by_side(commands: Sequence[Sequence[str]]) -> None:
    """Run this script several times at once and print what each says."""
    start = time.monotonic()
    script = [sys.executable, str(Path(__file__).resolve())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [(command, subprocess.Popen([*script, *command], **pipes)) for command in commands]  # type: ignore[call-overload]
    for command, process in running:
        try:
            said, _ = process.communicate(timeout=max(1.0, MOST_SECONDS - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            said = f"stopped after {MOST_SECONDS} s: {process.communicate()[0]}"
        print(" ".join(command), f"(exit {process.returncode})", said[-3000:], sep="\n", flush=True)


def main() -> None:
    """Check, compile, measure."""
    start = time.monotonic()
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(Path.home() / ".deep_gemm"))
    if not ON_GPU:
        # As the plugin's tests do.
        import emulated_deep_gemm

        emulated_deep_gemm.install()
    if sys.argv[1:2] == ["kit"]:
        return run_kit(sys.argv[2])
    if sys.argv[1:2] == ["compile"]:
        return compile_layer(int(sys.argv[2]))
    library = deep_gemm()
    for call in CALLS.values():
        told = {name: parameters(getattr(library, name)) for name in call.names if hasattr(library, name)}
        print({name: known if known is None else sorted(known) for name, known in told.items()})
    kits = [("kit", runner) for runner in RUNNERS]
    side_by_side([*kits, *(("compile", str(index)) for index in range(len(LAYERS)))])
    print(f"checked and compiled after {time.monotonic() - start:.0f} s", flush=True)
    for sizes in LAYERS:
        for dtype in SCHEMES:
            for row in measure(sizes, dtype):
                print(json.dumps(row), flush=True)
    name = torch.cuda.get_device_name() if ON_GPU else "CPU, emulated"
    print(f"{name}, torch {torch.__version__}, triton {version('triton')}, deep_gemm {library.__version__}")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
