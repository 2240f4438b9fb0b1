"""Stored weights to fp32: one reader per element type, one way to apply the scales of any tile."""

from __future__ import annotations

import torch
from torch.nn import functional

from moe_core.kernels.number_formats import PAIRS, scale_values
from moe_core.payloads import Tensor
from moe_core.quant import WHOLE


def num_columns(weight: Tensor, weight_dtype: str) -> int:
    """Elements in the last axis of a stored weight; 4-bit ones share bytes."""
    return weight.shape[-1] * (2 if weight_dtype in PAIRS else 1)


def read_codes(out: Tensor, weight: Tensor, weight_dtype: str) -> None:
    """The numbers of `weight [rows, stored]`, without any scale, into fp32 `out [rows, C]` of any strides."""
    if weight_dtype in PAIRS:
        out.copy_(functional.embedding(weight.int(), PAIRS[weight_dtype].to(weight.device)).view(out.shape))
    else:
        out.copy_(weight)


def apply_scales(out: Tensor, scale: Tensor | None, zero_point: Tensor | None, group: int) -> None:
    """Subtract zero points, then multiply by scales, in place.

    Args:
        out: fp32 `[rows, C]`, any strides.
        scale: `[rows, C / group]`, rounded up, as stored; None where the caller multiplies the outputs.
        zero_point: int8 of the shape of `scale`, or None.
        group: Columns that share a scale, `WHOLE` for all of them; the last group of a row may be shorter.
    """
    columns = out.shape[1]
    group = columns if group == WHOLE else group
    whole = columns // group
    groups, rest = out[:, : whole * group].unflatten(1, (whole, group)), out[:, whole * group :]
    for stored, change in ((zero_point, torch.Tensor.sub_), (scale, torch.Tensor.mul_)):
        if stored is None:
            continue
        values = scale_values(stored)
        change(groups, values[:, :whole, None])
        if rest.shape[1]:
            change(rest, values[:, whole:])


def tile_rows(stored: Tensor, first: int, count: int, rows_per_tile: int) -> Tensor:
    """The scales (or zero points) `[count, G]` of weight rows `first .. first + count`; a tile's serves all its rows.

    Args:
        stored: `[N / rows_per_tile, G]`, rounded up.
        first: First weight row.
        count: Weight rows.
        rows_per_tile: `WHOLE` where one row of scales serves every weight row.
    """
    if rows_per_tile == 1:
        return stored[first : first + count]
    if rows_per_tile == WHOLE:
        return stored.expand(count, -1)
    return stored[torch.arange(first, first + count, device=stored.device) // rows_per_tile]
