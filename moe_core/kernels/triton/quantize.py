"""Rows to 8-bit codes and their scales, straight from tokens or from the result of the first projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_core.activation import ActivationSpec
from moe_core.kernels.codes import CODE_MAX
from moe_core.kernels.scale_layouts import PACKED_SCALES, block_strides, code_format
from moe_core.kernels.triton.activation import activation_constants, load_activated
from moe_core.kernels.triton.interpreter import narrow
from moe_core.kernels.triton.rows import exists, flat_rows, row_range, rows_per_program, scale_offset
from moe_core.kernels.triton.sort import RowTiles
from moe_core.payloads import Tensor
from moe_core.specs import TokenDtype

_VALUES_PER_PROGRAM = 4096


def quantize(
    rows: Tensor, token_dtype: TokenDtype, *, activation: ActivationSpec | None = None, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `ops.quantize`; rows that do not exist are neither read nor written."""
    dtype, layout = code_format(token_dtype)
    width = _width(rows, activation)
    scales = layout.empty(rows.shape[:-1], width, rows.device)
    codes = _quantize(rows, dtype, layout.group or width, scales, activation, packed=layout.packed, real=real)
    return codes, scales[..., 0] if token_dtype.scales == "token" else scales


def quantize_rows(
    rows: Tensor,
    dtype: torch.dtype,
    group: int,
    *,
    static_scale: Tensor | None = None,
    activation: ActivationSpec | None = None,
    tiles: RowTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes `[R, C]` of `dtype` and scales fp32 `[R, ceil(C / group)]`; numbers as in `ops.quantize`.

    Args:
        rows: `[R, C]`, `[R, 2C]` before a gated activation; any float dtype.
        dtype: float8_e4m3fn or int8.
        group: Channels that share a scale; a power of two, or C for one scale per row.
        static_scale: fp32 `[L]`, the scale of every group of an expert's rows, which may saturate; needs `tiles`. None
            for scales from the rows.
        activation: Applied first, in fp32 and without rounding between; None for none.
        tiles: The rows that exist; others are neither read nor written. None for all.
    """
    scales = rows.new_empty((rows.shape[0], triton.cdiv(_width(rows, activation), group)), dtype=torch.float32)
    return _quantize(rows, dtype, group, scales, activation, tiles=tiles, static_scale=static_scale), scales


def _width(rows: Tensor, activation: ActivationSpec | None) -> int:
    return rows.shape[-1] // (1 if activation is None else activation.rows_per_channel)


def _quantize(
    rows: Tensor,
    dtype: torch.dtype,
    group: int,
    scales: Tensor,
    activation: ActivationSpec | None,
    *,
    packed: bool = False,
    real: Tensor | None = None,
    tiles: RowTiles | None = None,
    static_scale: Tensor | None = None,
) -> Tensor:
    """Writes `scales`, returns the codes; one launch."""
    width = _width(rows, activation)
    codes = rows.new_empty((*rows.shape[:-1], width), dtype=dtype)
    flat = flat_rows(rows)
    num_rows, num_groups = flat.shape[0], triton.cdiv(width, group)
    if not num_rows:
        return codes
    block = triton.next_power_of_2(group)
    groups = min(max(1, _VALUES_PER_PROGRAM // block), triton.next_power_of_2(num_groups))
    if packed:
        groups = max(groups, PACKED_SCALES)
    run = rows_per_program(num_rows, real) if tiles is None else tiles.block_m
    programs = triton.cdiv(num_rows, run) if tiles is None else len(tiles)
    _quantize_rows[(programs, triton.cdiv(num_groups, groups))](
        flat,
        codes,
        scales,
        static_scale,
        None if tiles is None else tiles.table,
        None if real is None else real.contiguous(),
        width,
        flat.stride(0),
        group,
        num_groups,
        run,
        num_rows,
        *block_strides(scales),
        BLOCKS=rows.dim() == 3,
        PACKED=packed,
        GROUPS=groups,
        BLOCK=block,
        CODE_MAX=CODE_MAX[dtype],
        CODE_MIN=-CODE_MAX[dtype] - (dtype == torch.int8),
        INTERLEAVED=activation is not None and activation.row_order == "interleaved",
        **activation_constants(activation),
        num_warps=8 if groups * block > _VALUES_PER_PROGRAM else 4,
        # As the activation alone, which is one rounding after the other in torch, too.
        enable_fp_fusion=False,
    )
    return codes


@triton.jit
def _largest(values):
    """Largest absolute value along the last axis; on the bits, where NaN is above everything."""
    bits = tl.max(tl.abs(values).to(tl.int32, bitcast=True), axis=1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two_above(values):
    """As `number_formats.power_of_two_above`."""
    bits = tl.minimum(values.to(tl.int32, bitcast=True), 0x7F800000)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _codes(values, scale, CODE_MIN: tl.constexpr, CODE_MAX: tl.constexpr, DTYPE: tl.constexpr):
    """`[GROUPS, BLOCK]` values over their groups' scales, rounded and saturating; comparisons leave NaN alone."""
    divisor = tl.where(scale == 0.0, 1.0, scale)
    code = tl.div_rn(values, tl.broadcast_to(divisor[:, None], values.shape))
    code = tl.where(code > CODE_MAX, CODE_MAX, tl.where(code < CODE_MIN, CODE_MIN, code))
    if tl.int8 == DTYPE:
        # 1.5 * 2**23: adding it leaves no fraction bits, so the sum is rounded half to even.
        code = (code + 12582912.0) - 12582912.0
        # NaN is in the scale; as an integer it would be anything.
        code = tl.where(code == code, code, 0.0)
    return narrow(code, DTYPE)


@triton.jit
def _store_scales(place, scale, groups, num_groups, stride_word, PACKED: tl.constexpr):
    if PACKED:
        exponent = tl.where(groups < num_groups, scale.to(tl.int32, bitcast=True) >> 23, 0)
        byte = place.to(tl.pointer_type(tl.uint8), bitcast=True) + 4 * (groups // 4).to(tl.int64) * stride_word
        tl.store(byte + groups % 4, exponent.to(tl.uint8), mask=groups < (num_groups + 3) // 4 * 4)
    else:
        tl.store(place + groups.to(tl.int64) * stride_word, scale, mask=groups < num_groups)


@triton.jit(do_not_specialize=["run", "num_rows", "block_rows", "stride_block", "stride_word"])
def _quantize_rows(
    rows,
    codes,
    scales,
    static_scale,
    tiles,
    real,
    width,
    stride,
    group,
    num_groups,
    run,
    num_rows,
    block_rows,
    stride_block,
    stride_row,
    stride_word,
    BLOCKS: tl.constexpr,
    PACKED: tl.constexpr,
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
    first, end = row_range(tiles, tl.program_id(0), run, num_rows)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.arange(0, BLOCK)
    columns = groups[:, None] * group + inside[None, :]
    # Columns past a group belong to the next one.
    there = (inside[None, :] < group) & (columns < width)
    for row in range(first, end):
        if exists(real, row, block_rows, BLOCKS):
            value = load_activated(
                rows + row * stride, columns, width, INTERLEAVED, KIND, GATED, ALPHA, LIMIT, BETA, CLAMP_AFTER
            )
            value = tl.where(there, value, 0.0)
            if static_scale is None:
                scale = tl.div_rn(_largest(value), tl.full((GROUPS,), CODE_MAX, tl.float32))
                if PACKED:
                    scale = _power_of_two_above(scale)
            else:
                # An unused entry has no rows and the expert -1.
                expert = tl.maximum(tl.load(tiles + 3 * tl.program_id(0)), 0)
                scale = tl.full((GROUPS,), 0.0, tl.float32) + tl.load(static_scale + expert)
            code = _codes(value, scale, CODE_MIN, CODE_MAX, codes.dtype.element_ty)
            tl.store(codes + row * width + columns, code, mask=there)
            place = scales + scale_offset(row, block_rows, stride_block, stride_row)
            _store_scales(place, scale, groups, num_groups, stride_word, PACKED)
