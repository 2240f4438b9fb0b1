"""Weights for `fused_deep_moe`, in the layout of either mode.

| | mode 1 | mode 2 |
|---|---|---|
| `w13` | `[L, H, 2I]`, columns of gate and up in turns of 64 | `[L, H, 2I]`, gate then up |
| its scales | fp32 `[L, 2I]`, in the order of the columns | the bits of fp32 in int64 `[L, 2I]` |
| `w2` | `[L, H, I]`, as it is stored | `[L, I, H]` |
| its scales | fp32 `[L, H]` | the bits of fp32 in int64 `[L, H]` |

All weights are int8 in tiles (NZ). Source: sgl-kernel-npu, document and tests of `fused_deep_moe` (August 2026).
"""

from __future__ import annotations

import torch

from moe_core.payloads import PreparedWeights, RawWeights, Tensor
from moe_core.plan import MoEPlan
from moe_plugin_ascend.fuseep_specs import FUSE_MODES
from moe_plugin_ascend.layouts import scale_bits, transposed
from moe_plugin_ascend.weights import Made, lay_out

#: Rows of the gate that mode 1 wants before as many of the up half.
TURN = 64


def in_turns(rows: Tensor) -> Tensor:
    """`[2I, ...]` with rows [gate; up] -> 64 of the gate, 64 of up, the next 64 of the gate, ...; I is so divisible."""
    return rows.view(2, -1, TURN, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def prepare(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """The weights of a layer in the layout of its runner; with `out`, refilled in place.

    A rank with fewer experts than others has memory for as many: the library counts the same on every rank.
    """
    layout = plan.routes[0].runner.spec.weight_layout
    makers = {1: {"w13": _turned, "w2": _as_stored}, 2: {"w13": _flipped, "w2": _flipped}}[FUSE_MODES[layout]]
    return lay_out(weights, out, layout, makers, count=plan.request.max_local_experts, is_tiled=True)


def _turned(name: str, raw: dict[str, Tensor]) -> Made:
    scale = in_turns(raw[f"{name}_scale"])
    return Made(transposed(in_turns(raw[name])), {"_scale": scale.to(torch.float32, copy=True)})


def _as_stored(name: str, raw: dict[str, Tensor]) -> Made:
    matrix = raw[name].clone(memory_format=torch.contiguous_format)
    return Made(matrix, {"_scale": raw[f"{name}_scale"].to(torch.float32, copy=True)})


def _flipped(name: str, raw: dict[str, Tensor]) -> Made:
    return Made(transposed(raw[name]), {"_scale": scale_bits(raw[f"{name}_scale"])})
