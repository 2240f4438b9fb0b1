"""Tokens rounded to codes and written to the rows of their slots, in one pass: what fp8 and int8 GEMMs read.

To round first and to copy codes and scales afterwards would write and read the codes of every token once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl

from moe_core.kernels.quantize import CODE_MAX, CODE_MIN
from moe_core.kernels.scale_layouts import block_strides, code_format
from moe_core.kernels.triton.codes import codes_of, dynamic_scale, power_of_two_above, store_scales
from moe_core.kernels.triton.launch import Constants, Launches, divided_up, looked_at, power_of_two
from moe_core.kernels.triton.quantize import program_of
from moe_core.kernels.triton.rows import flat_rows, scale_offset
from moe_core.payloads import Tensor
from moe_core.specs import TokenDtype

#: Of one token: a program stores each value once for every slot. On an H100, 8192 tokens of 128, 256 and 512 experts
#: took 71.5, 248.8 and 181.0 us, and 72.1, 254.1 and 185.4 with 1024 values.
_VALUES_PER_PROGRAM = 256


def rounded_rows(
    hidden_states: Tensor, row_map: Tensor, size: Sequence[int], token_dtype: TokenDtype
) -> tuple[Tensor, Tensor]:
    """Codes `[*size, H]` and their scales; rows without a slot are not written.

    Args:
        hidden_states: `[T, H]` of any float dtype.
        row_map: `[T, K]` int32, the row of each slot among the flattened ones, -1 for none.
        size: `R`, or `L, M`.
        token_dtype: As in `ops.quantize`, with scales of groups.
    """
    num_tokens, width = hidden_states.shape
    dtype, layout = code_format(token_dtype)
    codes = hidden_states.new_empty((*size, width), dtype=dtype)
    scales = layout.empty(size, width, hidden_states.device)
    if num_tokens and codes.numel():
        values, num_groups = flat_rows(hidden_states), layout.num_groups(width)
        block = power_of_two(layout.group)
        groups, warps = program_of(block, num_groups, layout.packed, _VALUES_PER_PROGRAM)
        block_rows, stride_block, stride_row, stride_word = block_strides(scales)
        sizes = width, values.stride(0), layout.group, num_groups
        unit = dtype, row_map.shape[1], layout.packed, groups, block, warps
        # The outputs are new, and therefore aligned.
        key = unit, looked_at(values, row_map, *sizes, stride_row)
        arguments = values, codes, scales, row_map, *sizes, block_rows, stride_block, stride_row, stride_word
        _launches(key, (num_tokens, divided_up(num_groups, groups), 1), arguments, partial(_constants, *unit))
    return codes, scales


def _constants(dtype: torch.dtype, top_k: int, packed: bool, groups: int, block: int, warps: int) -> Constants:
    shape = {"TOP_K": top_k, "PACKED": packed, "GROUPS": groups, "BLOCK": block}
    # As in `quantize`: the same bits.
    return {**shape, "CODE_MAX": CODE_MAX[dtype], "CODE_MIN": CODE_MIN[dtype]}, {
        "num_warps": warps,
        "enable_fp_fusion": False,
    }


@triton.jit(do_not_specialize=["block_rows", "stride_block", "stride_word"])
def _rounded_rows(
    x,
    codes,
    scales,
    row_map,
    width,
    stride,
    group,
    num_groups,
    block_rows,
    stride_block,
    stride_row,
    stride_word,
    TOP_K: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE_MAX: tl.constexpr,
    CODE_MIN: tl.constexpr,
):
    """Groups of a token are read and rounded once, and written to each of its rows."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.arange(0, BLOCK)
    columns = groups[:, None] * group + inside[None, :]
    # Columns past a group belong to the next one.
    there = (inside[None, :] < group) & (columns < width)
    value = tl.load(x + token * stride + columns, mask=there, other=0.0).to(tl.float32)
    scale = dynamic_scale(value, CODE_MAX)
    if PACKED:
        scale = power_of_two_above(scale)
    code = codes_of(value, scale, CODE_MIN, CODE_MAX, codes.dtype.element_ty)
    for slot in tl.static_range(TOP_K):
        row = tl.load(row_map + token * TOP_K + slot).to(tl.int64)
        # A slot without a row writes nothing.
        tl.store(codes + row * width + columns, code, mask=there & (columns < tl.where(row >= 0, width, 0)))
        place = scales + scale_offset(row, block_rows, stride_block, stride_row)
        store_scales(place, scale, groups, tl.where(row >= 0, num_groups, 0), stride_word, PACKED)


_launches = Launches(_rounded_rows)
