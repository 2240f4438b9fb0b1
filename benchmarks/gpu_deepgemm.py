"""Runner deep_gemm on one NVIDIA GPU: the conformance kit on the real kernels, then times of whole layers.

Run: PYTHONPATH=.:plugins/cuda_deepgemm:SITE python benchmarks/gpu_deepgemm.py [OPTIONS] [bf16|fp8]  (SITE: deep_gemm)

`--no-kit` leaves the kit out, `--no-forms` the GEMMs alone at other numbers of tokens and told about groups otherwise.
Kernels are compiled first, by processes side by side: those of the kit, and for each layer those of DeepGEMM and of
Triton. Their caches on disk (`DG_JIT_CACHE_DIR`, `TRITON_CACHE_DIR`) are what the times start from, and those of a
`moe-core tune` of the same layers and token counts afterwards. A time is that of replayed CUDA graphs of a whole layer,
dispatch and combine included, beside the two GEMMs alone on rows that were permuted before. Every layer's output is
compared with the layer in fp32, as called and as replayed. On a CPU the script runs on tiny layers over the emulated
library of the plugin's tests (in PYTHONPATH), to be tried out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import torch
from deepgemm_compile import (
    COUNTS,
    DEVICE,
    FORMS,
    LAYERS,
    ON_GPU,
    SCHEMES,
    Work,
    compile_layer,
    layer_of,
    request_of,
)
from moe_plugin_deepgemm import plugin
from moe_plugin_deepgemm.experts import DeepGemmExperts, TellGroups
from moe_plugin_deepgemm.library import CALLS, deep_gemm, parameters

from moe_core.environment import PRESETS
from moe_core.kernels import ops
from moe_core.layer import MoELayer
from moe_core.payloads import Tensor
from moe_core.request import LayerRequest
from moe_core.testing import Kit
from moe_core.tuning.ceilings import measure_ceilings
from moe_core.tuning.layers import Batches, random_weights, release_memory
from moe_core.tuning.reference import Reference
from moe_core.tuning.timing import prepare, take_turns

TOKENS = COUNTS[-1]
#: Kernel names of the kit: one process for each.
RUNNERS = tuple(f"{dtype}_{format_}" for dtype in SCHEMES for format_ in ("contiguous", "masked"))
#: Seconds after which processes of the kit begin no further check.
KIT_SECONDS = 60

Call = Callable[[], Any]
Arguments = tuple[Tensor, Tensor, Tensor]


def moved_bytes(request: LayerRequest, num_tokens: int) -> dict[str, int]:
    """Bytes that a layer's passes around its GEMMs read and write, scales of 128 channels included.

    Tokens are rounded while they are permuted.
    """
    rows, hidden, inner = num_tokens * request.top_k, request.hidden_size, request.intermediate_size
    floats = 2.0
    codes = 1 + 4 / 128 if request.quant.is_quantized else floats
    return {
        "permute": int((num_tokens * floats + rows * codes) * hidden),
        "activation": int(rows * inner * (2 * floats + codes)),
        "combine": int((rows + num_tokens) * hidden * floats),
    }


def gemms_alone(layer: MoELayer, arguments: Arguments, tell_groups: TellGroups | None = None) -> Call:
    """The two library calls of a layer on rows that lie where they are wanted: what everything around them adds to."""
    bound = layer._bound.routes[0]  # type: ignore[union-attr]
    experts: DeepGemmExperts = bound.experts
    tokens, _ = bound.dispatch(*arguments)
    inputs: list[Any] = []
    record = attrs.evolve(experts, w13=_Recorded(experts.w13, inputs), w2=_Recorded(experts.w2, inputs))
    if tell_groups is not None:
        record = attrs.evolve(record, tell_groups=tell_groups)
    record(tokens)
    (first, groups), (second, _) = inputs

    def call() -> Tensor:
        experts.w13(first, groups)
        return experts.w2(second, groups)

    return call


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


def parts(layer: MoELayer, arguments: Arguments) -> dict[str, Call]:
    """What stands around the GEMMs, pass by pass."""
    bound = layer._bound.routes[0]  # type: ignore[union-attr]
    experts: DeepGemmExperts = bound.experts
    tokens, handle = bound.dispatch(*arguments)
    num_rows = tokens.hidden_states.shape[0]
    counts = tokens.num_tokens_per_expert, tokens.group_ends, num_rows
    of_rows = ops.row_experts(*counts)
    hidden = torch.randn(num_rows, experts.w13.shape[1], dtype=torch.bfloat16, device=DEVICE)
    rows = torch.randn(num_rows, experts.w2.shape[1], dtype=torch.bfloat16, device=DEVICE)
    return {
        "dispatch": lambda: bound.dispatch(*arguments),
        "groups": lambda: experts.tell_groups(tokens, ops.row_experts(*counts)),
        "activation": lambda: experts._inside(hidden, of_rows),
        "combine": lambda: bound.combine(rows, handle),
    }


def time_forms(layer: MoELayer, request: LayerRequest, num_tokens: int) -> dict[str, float]:
    """The two GEMMs alone, by how the library is told about groups."""
    release_memory(DEVICE)
    batches = Batches.random(request, num_tokens, DEVICE)
    inputs = [batches.one(index) for index in range(batches.num_sets)]
    ready = {}
    for form, tell_groups in FORMS.items():
        try:
            ready[form] = prepare([gemms_alone(layer, one, tell_groups) for one in inputs], DEVICE)
        except (RuntimeError, TypeError) as error:
            print(f"{form} is not taken: {str(error).splitlines()[0]}")
    times = take_turns(ready, repeats=7, seconds=0.6)
    return {form: round(timing.microseconds, 1) for form, timing in times.items()}


def measure(sizes: tuple[int, ...], dtype: str, bytes_per_us: float, counts: Sequence[int]) -> dict[str, Any]:
    """The row of one layer; GEMMs alone at `counts` tokens."""
    request = request_of(sizes, dtype)
    weights, batches = random_weights(request, DEVICE), Batches.random(request, TOKENS, DEVICE)
    reference = Reference(request, weights, batches.one(0))
    ready, errors = {}, {}
    for name, runner in (("deep_gemm", f"deep_gemm.{dtype}_contiguous"), ("triton", "triton.fused")):
        if name == "triton" and not ON_GPU:
            continue
        layer = layer_of(request, weights, TOKENS, runner)
        if name == "deep_gemm":
            forms = {count: time_forms(layer, request, count) for count in counts}
        errors[name] = [reference.error(layer(*batches.one(0)))]
        ready[name] = prepare(batches.calls(layer), DEVICE)
        ready[name].sample()
        errors[name] += [reference.error(output) for output in ready[name].outputs[:1]]
        if name != "deep_gemm":
            continue
        told = layer._bound.routes[0].experts.tell_groups.__name__  # type: ignore[union-attr]
        inputs = [batches.one(index) for index in range(batches.num_sets)]
        ready["GEMMs alone"] = prepare([gemms_alone(layer, one) for one in inputs], DEVICE)
        passes = {part: prepare([call], DEVICE) for part, call in parts(layer, inputs[0]).items()}
    times = take_turns(ready, repeats=9, seconds=1.5)
    around = take_turns(passes, repeats=5, seconds=0.5)
    moved = moved_bytes(request, TOKENS)
    least = sum(moved.values()) / bytes_per_us
    aim = times["GEMMs alone"].microseconds + 1.2 * least + 30
    return {
        "layer": sizes,
        "weights": dtype,
        "T": TOKENS,
        "groups told": told,
        "GEMMs us by form": forms,
        "us": {name: round(timing.microseconds, 1) for name, timing in times.items()},
        "spread": {name: round(timing.spread, 3) for name, timing in times.items()},
        "parts us": {name: round(timing.microseconds, 1) for name, timing in around.items()},
        "moved MB": {name: round(size / 1e6, 1) for name, size in moved.items()},
        "moved us": round(least, 1),
        "aim us": round(aim, 1),
        "within aim": times["deep_gemm"].microseconds <= aim,
        "error": {name: [float(f"{e:.2g}") for e in found] for name, found in errors.items()},
        "right": all(e < reference.tolerance for found in errors.values() for e in found),
    }


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
        return compile_layer(int(sys.argv[2]), *sys.argv[3:])
    library = deep_gemm()
    for call in CALLS.values():
        told = {name: parameters(getattr(library, name)) for name in call.names if hasattr(library, name)}
        print({name: known if known is None else sorted(known) for name, known in told.items()})
    dtypes = [dtype for dtype in SCHEMES if dtype in sys.argv] or list(SCHEMES)
    kits = [] if "--no-kit" in sys.argv else [Work(("kit", runner), gigabytes=1) for runner in RUNNERS]
    counts = COUNTS[:0] if "--no-forms" in sys.argv else COUNTS
    Work.run_all([*Work.compiling(dtypes, "deep_gemm" if counts else "deep_gemm_last"), *kits])
    print(f"checked and compiled after {time.monotonic() - start:.0f} s", flush=True)
    ceilings = measure_ceilings(DEVICE, ())
    print(f"bandwidth {ceilings}", flush=True)
    for sizes in LAYERS:
        for dtype in dtypes:
            release_memory(DEVICE)
            print(json.dumps(measure(sizes, dtype, ceilings.bytes_per_us, counts)), flush=True)
    name = torch.cuda.get_device_name() if ON_GPU else "CPU, emulated"
    print(f"{name}, torch {torch.__version__}, triton {version('triton')}, deep_gemm {library.__version__}")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
