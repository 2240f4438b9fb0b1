"""Declarations of runner `ascend`: grouped GEMMs of torch_npu on rows grouped by expert.

One kernel for each kind of stored weights, and each in two layouts: in the tiles that the matrix unit reads
(FRACTAL_NZ) where both matrices are whole tiles, and plain (`_nd`) where they are not. A decision that falls back to
the plain layout notes for which kernel it stands in, and the limit that was missed.
"""

from __future__ import annotations

import attrs

from moe_core.activation import ActivationPattern
from moe_core.quant import BF16, W4A4_INT4, W4A8_INT8, W8A8_INT8, LayerQuant
from moe_core.specs import Limit, RunnerSpec, TokenDtype
from moe_plugin_ascend.machine import ARCHS, DEVICES

_BF16 = TokenDtype("bf16")
_INT8 = TokenDtype("int8", "token")
_SIZES = ("hidden_size", "intermediate_size")

#: Any formula between the projections, and a model's own; the vendor's operators serve plain SwiGLU (see `steps`).
_ACTIVATIONS = (
    ActivationPattern(kind="any", gated=None, parameters=True, interleaved=True),
    ActivationPattern(kind="module", gated=None, parameters=True, interleaved=True),
)
#: Of `npu_grouped_matmul`: last axes below 65536, gate and up side by side in one of them; so many groups.
_GEMM_LIMITS = (
    Limit("hidden_size", "<=", 65535),
    Limit("intermediate_size", "<=", 32767),
    Limit("num_local_experts", "<=", 1024),
)


def _multiples(size: int, hint: str) -> tuple[Limit, ...]:
    return tuple(Limit(field, "multiple_of", size, hint) for field in _SIZES)


def _runner(kernel: str, schemes: tuple[LayerQuant, ...], reads: tuple[TokenDtype, ...], tile: int) -> RunnerSpec:
    """The kernel on weights in tiles; `tile` is the elements in the 32 bytes of a tile's row."""
    return RunnerSpec(
        name="ascend",
        kernel=kernel,
        format="contiguous",
        reads=reads,
        schemes=schemes,
        activations=_ACTIVATIONS,
        dtypes=("bf16",),
        weight_layout=f"ascend_{kernel}_nz",
        devices=DEVICES,
        archs=ARCHS,
        limits=(*_GEMM_LIMITS, *_multiples(tile, f"ascend.{kernel}_nd reads weights that are no whole tiles")),
        bias=kernel == "bf16",
        weight_on_input=True,
        post_norm=True,
        graph_safe=True,
        tier="tuned",
    )


def _plain(runner: RunnerSpec) -> RunnerSpec:
    """The same kernel on weights that are not in tiles."""
    # int4 comes in words of eight.
    words = _multiples(8, "runner torch takes any size") if runner.kernel in ("w4a8", "w4a4") else ()
    return attrs.evolve(
        runner,
        kernel=f"{runner.kernel}_nd",
        weight_layout=f"ascend_{runner.kernel}_nd",
        limits=(*_GEMM_LIMITS, *words),
        stands_in_for=runner.short_name,
    )


_TILED = (
    _runner("bf16", (LayerQuant.of(BF16),), (_BF16,), tile=16),
    _runner("w8a8", (LayerQuant.of(W8A8_INT8),), (_INT8, _BF16), tile=32),
    # ModelSlim describes each tensor by itself: w2 may keep eight bits.
    _runner("w4a8", (LayerQuant.of(W4A8_INT8), LayerQuant(W4A8_INT8, W8A8_INT8)), (_INT8, _BF16), tile=64),
    _runner("w4a4", (LayerQuant.of(W4A4_INT4), LayerQuant(W4A4_INT4, W8A8_INT8)), (_BF16,), tile=64),
)
RUNNERS = (*_TILED, *map(_plain, _TILED))
#: Weight layout -> module with its `prepare(plan, weights, out)` and `bind(plan, route, weights)`.
LAYOUTS = {runner.weight_layout: "moe_plugin_ascend.experts" for runner in RUNNERS}
