"""Tokens copied to the rows of their slots: what `contiguous` and `masked` tokens need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl

from moe_core.kernels.scale_layouts import block_strides, empty_scales
from moe_core.kernels.triton.interpreter import narrow
from moe_core.kernels.triton.launch import Constants, Launches, divided_up, looked_at, power_of_two
from moe_core.kernels.triton.rounded_rows import rounded_rows
from moe_core.kernels.triton.rows import flat_rows, scale_offset
from moe_core.kernels.triton.sort import SortedSlots, masked_row_map, permute
from moe_core.payloads import ContiguousTokens, MaskedTokens, Tensor
from moe_core.specs import TokenDtype

#: Integers that scales are copied as.
_BITS = {1: torch.uint8, 4: torch.int32}
#: Values of a token that one program copies, and its warps.
_COPY_BLOCK, _COPY_WARPS = 2048, 4
_EXPERT_ROWS = 256


def gather_rows(
    hidden_states: Tensor,
    slots: SortedSlots,
    row_weights: Tensor | None = None,
    weighted_dtype: torch.dtype | None = None,
) -> Tensor:
    """`[T, H]` -> `[T * K, H]`: each slot's token at its row; rows without a slot are not written.

    Args:
        hidden_states: Tokens.
        slots: `sort_slots` of their ids.
        row_weights: `[T, K]`, multiplied in fp32; None for a plain copy.
        weighted_dtype: What their products are rounded to; None for the tokens' dtype.
    """
    size = (slots.order.shape[0],)
    return _copy_tokens(hidden_states, slots.row_map, size, row_weights, weighted_dtype=weighted_dtype)[0]


def permute_contiguous(
    hidden_states: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    *,
    alignment: int = 1,
    row_weights: Tensor | None = None,
    scales: Tensor | None = None,
    column_major: bool = False,
    num_rows: int | None = None,
    token_dtype: TokenDtype | None = None,
) -> tuple[ContiguousTokens, Tensor]:
    """As `ops.permute_contiguous`; rows without a slot are not written."""
    permutation = permute(topk_ids, num_experts, alignment)
    size = (permutation.num_rows if num_rows is None else num_rows,)
    if token_dtype is None:
        rows, row_scales = _copy_tokens(hidden_states, permutation.row_map, size, row_weights, scales, column_major)
    else:
        rows, row_scales = rounded_rows(hidden_states, permutation.row_map, size, token_dtype)
    tokens = ContiguousTokens(
        hidden_states=rows,
        num_tokens_per_expert=permutation.num_tokens_per_expert,
        group_ends=permutation.group_ends,
        scales=row_scales,
    )
    return tokens, permutation.row_map


def permute_masked(
    hidden_states: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    rows_per_expert: int,
    *,
    row_weights: Tensor | None = None,
    scales: Tensor | None = None,
    column_major: bool = False,
    token_dtype: TokenDtype | None = None,
) -> tuple[MaskedTokens, Tensor]:
    """As `ops.permute_masked`; rows without a slot are not written."""
    row_map, masked_m = masked_row_map(topk_ids, num_experts, rows_per_expert)
    size = num_experts, rows_per_expert
    if token_dtype is None:
        rows, row_scales = _copy_tokens(hidden_states, row_map, size, row_weights, scales, column_major)
    else:
        rows, row_scales = rounded_rows(hidden_states, row_map, size, token_dtype)
    expected_m = max(1, topk_ids.numel() // max(1, num_experts))
    tokens = MaskedTokens(hidden_states=rows, masked_m=masked_m, expected_m=expected_m, scales=row_scales)
    return tokens, row_map


def row_experts(num_tokens_per_expert: Tensor, group_ends: Tensor, num_rows: int) -> Tensor:
    """As `ops.row_experts`."""
    counts, ends = num_tokens_per_expert.contiguous(), group_ends.contiguous()
    experts = ends.new_empty((num_rows,))
    if num_rows:
        num_experts = ends.shape[0]
        # The output is new, and therefore aligned.
        halvings = num_experts.bit_length()
        key = halvings, looked_at(counts, ends)
        arguments = counts, ends, experts, num_rows, num_experts
        grid = divided_up(num_rows, _EXPERT_ROWS), 1, 1
        _find_experts(key, grid, arguments, partial(_expert_constants, halvings))
    return experts


def _expert_constants(halvings: int) -> Constants:
    return {"BLOCK": _EXPERT_ROWS, "HALVINGS": halvings}, {}


def _copy_tokens(
    hidden_states: Tensor,
    row_map: Tensor,
    size: Sequence[int],
    row_weights: Tensor | None = None,
    scales: Tensor | None = None,
    column_major: bool = False,
    weighted_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rows `[*size, H]` and their scales, by a row map into the flattened rows."""
    num_tokens, width = hidden_states.shape
    out = hidden_states.new_empty((*size, width), dtype=weighted_dtype)
    if scales is None:
        bits, row_scales = None, None
    else:
        bits = scales.view(_BITS[scales.itemsize])
        row_scales = empty_scales(size, scales.shape[1], scales.dtype, scales.device, column_major)
    if num_tokens and out.numel():
        values, rows = _as_bits(flat_rows(hidden_states)), _as_bits(out)
        tensors = values, rows, row_map, row_weights, bits, None if bits is None else row_scales.view(bits.dtype)  # type: ignore[union-attr]
        sizes = (
            *(width, values.stride(0), 0 if scales is None else scales.shape[1]),
            *((0, 0) if row_weights is None else row_weights.stride()),
            *((0, 0) if scales is None else scales.stride()),
        )
        block_rows, stride_block, stride_row, stride_word = (
            (1, 0, 0, 0) if row_scales is None else block_strides(row_scales)
        )
        block = min(_COPY_BLOCK, power_of_two(width))
        unit = row_map.shape[1], block, _COPY_WARPS, 1 if scales is None else power_of_two(scales.shape[1])
        key = unit, looked_at(*tensors, *sizes, stride_row)
        arguments = *tensors, *sizes, block_rows, stride_block, stride_row, stride_word
        _copy(key, (num_tokens, divided_up(width, block), 1), arguments, partial(_copy_constants, *unit))
    return out, row_scales


def _copy_constants(top_k: int, block: int, warps: int, scales: int) -> Constants:
    return {"TOP_K": top_k, "BLOCK": block, "SCALES": scales}, {"num_warps": warps}


def _as_bits(values: Tensor) -> Tensor:
    """Codes of one byte as integers: not every GPU has types for them."""
    return values.view(torch.uint8) if values.itemsize == 1 else values


@triton.jit(do_not_specialize=["block_rows", "stride_block", "stride_word"])
def _copy_rows(
    x,
    out,
    row_map,
    weights,
    scales,
    row_scales,
    width,
    stride,
    num_scales,
    stride_wt,
    stride_wk,
    stride_st,
    stride_ss,
    block_rows,
    stride_block,
    stride_row,
    stride_word,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
):
    """A token is read once, and written to each of its rows."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * stride + columns, mask=columns < width)
    words = tl.arange(0, SCALES)
    if scales is not None:
        # Few enough for the token's first program.
        has_scale = words < tl.where(tl.program_id(1) == 0, num_scales, 0)
        scale = tl.load(scales + token * stride_st + words * stride_ss, mask=has_scale)
    for slot in tl.static_range(TOP_K):
        row = tl.load(row_map + token * TOP_K + slot).to(tl.int64)
        # A slot without a row writes nothing.
        there = columns < tl.where(row >= 0, width, 0)
        written = value
        if weights is not None:
            factor = tl.load(weights + token * stride_wt + slot * stride_wk).to(tl.float32)
            written = narrow(value.to(tl.float32) * factor, out.dtype.element_ty)
        tl.store(out + row * width + columns, written, mask=there)
        if scales is not None:
            place = row_scales + scale_offset(row, block_rows, stride_block, stride_row)
            tl.store(place + words * stride_word, scale, mask=has_scale & (words < tl.where(row >= 0, num_scales, 0)))


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _row_experts(counts, ends, experts, num_rows, num_experts, BLOCK: tl.constexpr, HALVINGS: tl.constexpr):
    """A row's expert is the number of groups that end before it, found by halving what is left of them."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.zeros((BLOCK,), dtype=tl.int32)
    for step in tl.static_range(HALVINGS):
        further = expert + (1 << (HALVINGS - 1 - step))
        end = tl.load(ends + further - 1, mask=further <= num_experts, other=2147483647)
        expert = tl.where(end <= rows, further, expert)
    grouped = (rows < num_rows) & (expert < num_experts)
    start = tl.load(ends + expert - 1, mask=grouped & (expert > 0), other=0)
    count = tl.load(counts + expert, mask=grouped, other=0)
    tl.store(experts + rows, tl.where(rows - start < count, expert, -1), mask=rows < num_rows)


_copy, _find_experts = map(Launches, (_copy_rows, _row_experts))
