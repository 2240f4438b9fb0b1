"""Experts in memory, in another order or orientation -> canonical ones, without copying where a view can say it.

For users who have the tensors already; checkpoints are read by `loading`, which does the same while it reads.
"""

from __future__ import annotations

import torch

from moe_core.errors import WeightsError
from moe_core.payloads import Tensor
from moe_core.vocabulary import require_word

LAYOUTS = ("gate_up", "up_gate", "interleaved")
ORIENTATIONS = ("out_in", "in_out")

#: Tensors that have gate and up along axis 1.
_ROWS = ("w13", "b13", "w13_scale", "w13_zero_point", "w13_global_scale")


def canonical_rows(tensor: Tensor, layout: str) -> Tensor:
    """Rows of `w13`, `b13` or a scale as [gate; up].

    Args:
        tensor: `[E, 2I, ...]`, gate and up together.
        layout: `gate_up` (returned as it is), `up_gate`, or `interleaved` (gate at even rows).
    """
    require_word(layout, LAYOUTS, "weight layout")
    if layout == "gate_up":
        return tensor
    if layout == "up_gate":
        up, gate = tensor.chunk(2, dim=1)
    else:
        gate, up = tensor[:, 0::2], tensor[:, 1::2]
    return torch.cat([gate, up], dim=1)


def canonical_orientation(tensor: Tensor, orientation: str) -> Tensor:
    """`[E, out, in]` from `[E, out, in]` or `[E, in, out]`; the latter as a view."""
    require_word(orientation, ORIENTATIONS, "weight orientation")
    return tensor if orientation == "out_in" else tensor.mT


def canonical_weights(
    tensors: dict[str, Tensor], *, layout: str = "gate_up", orientation: str = "out_in", gated: bool = True
) -> dict[str, Tensor]:
    """Canonical tensors from stored ones.

    Layout and orientation must be told: no shape can tell them when 2I equals H.

    Args:
        tensors: Stored tensors by their canonical names (`w13`, `w2`, `b13`, `b2`, scales).
        layout: Order of the gate and up rows as stored; ignored when not gated.
        orientation: `out_in` or `in_out`, for weights and block scales alike.
        gated: Whether `w13` holds two halves.

    Scales of row tiles in another order than `gate_up` need the size of a tile: `loading.cut` reads them.

    Raises:
        SpecError: An unknown layout or orientation.
        WeightsError: The scales of `w13` cover tiles of rows and the layout is not `gate_up`.
    """
    turned = {
        name: canonical_orientation(tensor, orientation) if tensor.dim() == 3 else tensor
        for name, tensor in tensors.items()
    }
    if not gated:
        return turned
    for name in ("w13_scale", "w13_zero_point"):
        scale = turned.get(name)
        weight = turned.get("w13")
        if layout == "gate_up" or scale is None or weight is None:
            continue
        if scale.dim() > 2 and scale.shape[1] != weight.shape[1]:
            raise WeightsError(
                f"{name} {list(scale.shape)}: scales of row tiles cannot be reordered from {layout!r} without the size "
                "of a tile; use moe_core.weights.loading.cut with StoredLayout(rows=...)"
            )
    return {
        # Two scales per expert are those of the halves, in the order of the rows.
        name: canonical_rows(tensor, layout) if name in _ROWS and tensor.dim() > 1 else tensor
        for name, tensor in turned.items()
    }
