"""Rows to 8-bit codes and fp32 scales, straight from tokens or from the result of the first projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_core.activation import ActivationSpec
from moe_core.kernels.number_formats import E4M3_MAX
from moe_core.kernels.triton.activation import activation_constants, load_activated, row_range
from moe_core.kernels.triton.interpreter import narrow
from moe_core.kernels.triton.sort import RowTiles
from moe_core.payloads import Tensor

#: Largest code of each dtype; a row's or group's largest value gets it.
CODE_MAX = {torch.float8_e4m3fn: E4M3_MAX, torch.int8: 127.0}
_VALUES_PER_PROGRAM = 4096


def quantize_rows(
    rows: Tensor,
    dtype: torch.dtype,
    group: int,
    *,
    static_scale: Tensor | None = None,
    activation: ActivationSpec | None = None,
    tiles: RowTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes `[R, C]` of `dtype` and scales fp32 `[R, ceil(C / group)]`, of the rows or of an activation of them.

    scale = amax / largest code of each group in fp32 (zeros stay zeros), code = value / scale, rounded half to even and
    saturating: the numbers of `moe_core.kernels.quantize`.

    Args:
        rows: `[R, C]`, `[R, 2C]` before a gated activation; any float dtype, unit stride along columns.
        dtype: float8_e4m3fn or int8.
        group: Channels that share a scale; a power of two, or C for one scale per row.
        static_scale: fp32 `[L]`, the scale of every group of an expert's rows, which may saturate; needs `tiles`. None
            for scales from the rows.
        activation: Applied first, in fp32 and without rounding between; None for none.
        tiles: The rows that exist; others are neither read nor written. None for all.
    """
    width = rows.shape[1] // (1 if activation is None else activation.rows_per_channel)
    codes = rows.new_empty((rows.shape[0], width), dtype=dtype)
    num_groups = triton.cdiv(width, group)
    scales = rows.new_empty((rows.shape[0], num_groups), dtype=torch.float32)
    block = triton.next_power_of_2(group)
    groups = min(max(1, _VALUES_PER_PROGRAM // block), triton.next_power_of_2(num_groups))
    grid = (rows.shape[0] if tiles is None else len(tiles), triton.cdiv(num_groups, groups))
    if rows.shape[0]:
        _quantize[grid](
            rows,
            codes,
            scales,
            static_scale,
            None if tiles is None else tiles.table,
            width,
            rows.stride(0),
            group,
            num_groups,
            BM=1 if tiles is None else tiles.block_m,
            GROUPS=groups,
            BLOCK=block,
            CODE_MAX=CODE_MAX[dtype],
            CODE_MIN=-CODE_MAX[dtype] - (dtype == torch.int8),
            INTERLEAVED=activation is not None and activation.row_order == "interleaved",
            **activation_constants(activation),
            num_warps=8 if groups * block > _VALUES_PER_PROGRAM else 4,
        )
    return codes, scales


@triton.jit
def _quantize(
    rows,
    codes,
    scales,
    static_scale,
    tiles,
    width,
    stride,
    group,
    num_groups,
    BM: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE_MAX: tl.constexpr,
    CODE_MIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BETA: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
):
    first, end = row_range(tiles, tl.program_id(0), BM)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.arange(0, BLOCK)
    columns = groups[:, None] * group + inside[None, :]
    # Columns past a group belong to the next one.
    there = (inside[None, :] < group) & (columns < width)
    for row in range(first, end):
        value = load_activated(
            rows + row * stride, columns, width, INTERLEAVED, KIND, GATED, ALPHA, LIMIT, BETA, CLAMP_AFTER
        )
        value = tl.where(there, value, 0.0)
        if static_scale is None:
            scale = tl.div_rn(tl.max(tl.abs(value), axis=1), tl.full((GROUPS,), CODE_MAX, tl.float32))
        else:
            # An unused entry has no rows and the expert -1.
            expert = tl.maximum(tl.load(tiles + 3 * tl.program_id(0)), 0)
            scale = tl.full((GROUPS,), 0.0, tl.float32) + tl.load(static_scale + expert)
        divisor = tl.where(scale == 0.0, 1.0, scale)
        code = tl.div_rn(value, tl.broadcast_to(divisor[:, None], (GROUPS, BLOCK)))
        code = tl.minimum(tl.maximum(code, CODE_MIN), CODE_MAX)
        if codes.dtype.element_ty == tl.int8:
            # 1.5 * 2**23: adding it leaves no fraction bits, so the sum is rounded half to even.
            code = (code + 12582912.0) - 12582912.0
        tl.store(codes + row * width + columns, narrow(code, codes.dtype.element_ty), mask=there)
        tl.store(scales + row * num_groups + groups, scale, mask=groups < num_groups)
