"""Rows to 8-bit codes and their scales, straight from tokens or from the result of the first projection."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_core.activation import ActivationSpec
from moe_core.kernels.quantize import CODE_MAX, CODE_MIN
from moe_core.kernels.scale_layouts import PACKED_SCALES, block_strides, code_format
from moe_core.kernels.triton.activation import activation_constants, load_activated
from moe_core.kernels.triton.codes import codes_of, dynamic_scale, power_of_two_above, store_scales
from moe_core.kernels.triton.launch import Constants, Launches, divided_up, looked_at
from moe_core.kernels.triton.rows import (
    TILE_FIELDS,
    count_program,
    exists,
    flat_rows,
    row_range,
    rows_per_program,
    scale_offset,
    tile_range,
    wait_for_rows,
)
from moe_core.kernels.triton.sort import RowTiles
from moe_core.payloads import Tensor
from moe_core.specs import TokenDtype

#: Of one row: a load of 16 bits a value is then two of 16 bytes in every thread.
_VALUES_PER_PROGRAM, _VALUES_PER_WARP, _MOST_WARPS = 1024, 512, 8
#: Rows of a tile that a program rounds one after the other.
_ROWS_PER_PROGRAM = 2


class _Variant(NamedTuple):
    """What the kernel is compiled for, apart from the types of its arguments.

    Attributes:
        dtype: Of the codes.
        activation: Applied first, None for none.
        masked: Whether rows lie in blocks, whose counts say which are real.
        packed: Whether scales are exponents, four in a word.
        groups: Groups of a row that a program has.
        block: The power of two that the channels of a group are in.
        parts: Programs that share the rows of a tile.
        pdl: As of `quantize_rows`.
        awaited: As of `quantize_rows`.
        warps: Of a program.
    """

    dtype: torch.dtype
    activation: ActivationSpec | None
    masked: bool
    packed: bool
    groups: int
    block: int
    parts: int
    pdl: str
    awaited: int
    warps: int

    def constants(self) -> Constants:
        constants = {
            "MASKED": self.masked,
            "PACKED": self.packed,
            "GROUPS": self.groups,
            "BLOCK": self.block,
            "PARTS": self.parts,
            "CODE_MAX": CODE_MAX[self.dtype],
            "CODE_MIN": CODE_MIN[self.dtype],
            "PDL": self.pdl,
            "AWAITED": self.awaited,
            "INTERLEAVED": self.activation is not None and self.activation.row_order == "interleaved",
            **activation_constants(self.activation),
        }
        # As the activation alone, which is one rounding after the other in torch, too.
        return constants, {"num_warps": self.warps, "enable_fp_fusion": False, "launch_pdl": self.pdl != ""}


def quantize(
    rows: Tensor, token_dtype: TokenDtype, *, activation: ActivationSpec | None = None, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `ops.quantize`; rows that do not exist are neither read nor written."""
    dtype, layout = code_format(token_dtype)
    width = _width(rows, activation)
    scales = layout.empty(rows.shape[:-1], width, rows.device)
    group = layout.group or width
    codes = _quantize(rows, dtype, group, scales, activation=activation, packed=layout.packed, real=real)
    return codes, scales[..., 0] if token_dtype.scales == "token" else scales


def quantize_rows(
    rows: Tensor,
    dtype: torch.dtype,
    group: int,
    *,
    static_scale: Tensor | None = None,
    tiles: RowTiles | None = None,
    pdl: str = "",
    awaited: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes `[R, C]` of `dtype` and scales fp32 `[R, ceil(C / group)]`; numbers as in `ops.quantize`.

    Args:
        rows: `[R, C]` of any float dtype.
        dtype: float8_e4m3fn or int8.
        group: Channels that share a scale; a power of two, or C for one scale per row.
        static_scale: fp32 `[L]`, the scale of every group of an expert's rows, which may saturate; needs `tiles`. None
            for scales from the rows.
        tiles: The rows that exist; others are neither read nor written. None for all.
        pdl: `read` or `write` for a launch that begins before the one in front of it has ended (see the package), and
            waits for it before it reads, or only before it writes, where that one writes none of its arguments.
        awaited: Start on a tile as soon as so many programs of the launch in front have counted themselves there,
            instead of after its end, and count on: `programs_per_tile`.
    """
    scales = rows.new_empty((rows.shape[0], divided_up(rows.shape[1], group)), dtype=torch.float32)
    codes = _quantize(rows, dtype, group, scales, tiles=tiles, static_scale=static_scale, pdl=pdl, awaited=awaited)
    return codes, scales


def programs_per_tile(block_m: int, width: int, group: int) -> int:
    """How many programs of `quantize_rows` round the rows of a tile."""
    num_groups = divided_up(width, group)
    groups, _ = program_of(_block(group), num_groups, False, _VALUES_PER_PROGRAM)
    return divided_up(block_m, _ROWS_PER_PROGRAM) * divided_up(num_groups, groups)


def _width(rows: Tensor, activation: ActivationSpec | None) -> int:
    return rows.shape[-1] // (1 if activation is None else activation.rows_per_channel)


def _quantize(
    rows: Tensor,
    dtype: torch.dtype,
    group: int,
    scales: Tensor,
    *,
    activation: ActivationSpec | None = None,
    packed: bool = False,
    real: Tensor | None = None,
    tiles: RowTiles | None = None,
    static_scale: Tensor | None = None,
    pdl: str = "",
    awaited: int = 0,
) -> Tensor:
    """Writes `scales`, returns the codes; one launch."""
    width = _width(rows, activation)
    codes = rows.new_empty((*rows.shape[:-1], width), dtype=dtype)
    flat = flat_rows(rows)
    num_rows, num_groups = flat.shape[0], divided_up(width, group)
    if not num_rows:
        return codes
    block = _block(group)
    groups, warps = program_of(block, num_groups, packed, _VALUES_PER_PROGRAM)
    if tiles is None:
        parts, run = 1, rows_per_program(num_rows, real)
        programs = divided_up(num_rows, run)
    else:
        run = min(tiles.block_m, _ROWS_PER_PROGRAM)
        parts = divided_up(tiles.block_m, run)
        programs = len(tiles) * parts
    block_rows, stride_block, stride_row, stride_word = block_strides(scales)
    table, real = None if tiles is None else tiles.table, None if real is None else real.contiguous()
    tensors = flat, codes, scales, static_scale, table, real
    sizes = width, flat.stride(0), group, num_groups
    variant = _Variant(dtype, activation, rows.dim() == 3, packed, groups, block, parts, pdl, awaited, warps)
    key = variant, looked_at(*tensors, *sizes, stride_row)
    arguments = *tensors, *sizes, run, num_rows, block_rows, stride_block, stride_row, stride_word
    _launches(key, (programs, divided_up(num_groups, groups), 1), arguments, variant.constants)
    return codes


def _block(group: int) -> int:
    """The power of two that a group is in."""
    return 1 << (group - 1).bit_length()


def program_of(block: int, num_groups: int, packed: bool, values: int) -> tuple[int, int]:
    """How many groups of `block` values of a row one program has, and its warps.

    As many as have `values` together, but one at least, no more than the row has, and those of a word if scales are
    packed.
    """
    of_row = 1 << (num_groups - 1).bit_length()
    groups = max(min(values // block, of_row), PACKED_SCALES if packed else 1)
    return groups, min(_MOST_WARPS, max(1, groups * block // _VALUES_PER_WARP))


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
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    CODE_MAX: tl.constexpr,
    CODE_MIN: tl.constexpr,
    PDL: tl.constexpr,
    AWAITED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BETA: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
):
    if PDL == "read":
        if not AWAITED:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tiles is None:
        first, end = row_range(tl.program_id(0), run, num_rows)
        expert = -1
    else:
        first, end, expert = tile_range(tiles, tl.program_id(0), run, PARTS)
        if AWAITED and expert >= 0:
            wait_for_rows(tiles + TILE_FIELDS * (tl.program_id(0) // PARTS), AWAITED)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.arange(0, BLOCK)
    columns = groups[:, None] * group + inside[None, :]
    # Columns past a group belong to the next one.
    there = (inside[None, :] < group) & (columns < width)
    for row in range(first, end):
        if exists(real, row, block_rows, MASKED):
            value = load_activated(
                rows + row * stride, columns, width, INTERLEAVED, KIND, GATED, ALPHA, LIMIT, BETA, CLAMP_AFTER
            )
            value = tl.where(there, value, 0.0)
            if static_scale is None:
                scale = dynamic_scale(value, CODE_MAX)
                if PACKED:
                    scale = power_of_two_above(scale)
            else:
                scale = tl.full((GROUPS,), 0.0, tl.float32) + tl.load(static_scale + expert)
                if codes.dtype.element_ty == tl.int8:
                    # Integers cannot hold NaN: it goes into the scale, as where that follows from the values.
                    found = dynamic_scale(value, CODE_MAX)
                    scale = tl.where(found == found, scale, found)
            code = codes_of(value, scale, CODE_MIN, CODE_MAX, codes.dtype.element_ty)
            if PDL == "write":
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            tl.store(codes + row * width + columns, code, mask=there)
            place = scales + scale_offset(row, block_rows, stride_block, stride_row)
            store_scales(place, scale, groups, num_groups, stride_word, PACKED)
    if AWAITED:
        if expert >= 0:
            count_program(tiles + TILE_FIELDS * (tl.program_id(0) // PARTS))
        if PDL == "read":
            # So that launches end in their order.
            tl.extra.cuda.gdc_wait()


_launches = Launches(_quantize_rows)
