"""Rows back to tokens: the weighted sum over a token's slots."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from moe_core.kernels.triton.interpreter import narrow
from moe_core.kernels.triton.launch import Constants, Launches, divided_up, is_aligned, power_of_two
from moe_core.kernels.triton.rows import flat_rows
from moe_core.kernels.triton.weights import strides_of
from moe_core.payloads import Tensor


def combine(
    rows: Tensor,
    row_map: Tensor,
    topk_weights: Tensor | None,
    dtype: torch.dtype,
    *,
    scaling_factor: float = 1.0,
    pdl: bool = False,
) -> Tensor:
    """Sum each token's rows, in slot order, in fp32, rounded once; product and sum are separate roundings.

    Args:
        rows: `[R, H]`, any float dtype; rows that no slot names are not read.
        row_map: `[T, K]` integers, row of each slot, -1 = none: skipped, whatever its weight.
        topk_weights: `[T, K]`, used as fp32; None when the rows are already weighted.
        dtype: Of the result.
        scaling_factor: Multiplies the sum, before it is rounded.
        pdl: Launched before the kernel that writes `rows`, and nothing else that this one reads, has ended (see the
            package).

    Returns:
        `[T, H]`; zeros for a token without any row.
    """
    num_tokens, top_k = row_map.shape
    width, rows = rows.shape[1], flat_rows(rows)
    out = rows.new_empty((num_tokens, width), dtype=dtype)
    if not num_tokens:
        return out
    block = min(1024, power_of_two(width))
    unit = top_k, block, pdl
    strides = width, rows.stride(0), *row_map.stride(), *strides_of(topk_weights, 2)
    # The output is new, and therefore aligned.
    key = (
        *(unit, strides, dtype, rows.dtype, row_map.dtype, None if topk_weights is None else topk_weights.dtype),
        *(is_aligned(rows), is_aligned(row_map), topk_weights is None or is_aligned(topk_weights)),
    )
    arguments = rows, row_map, topk_weights, out, float(scaling_factor), *strides
    _launches(key, (num_tokens, divided_up(width, block), 1), arguments, partial(_constants, *unit))
    return out


def _constants(top_k: int, block: int, pdl: bool) -> Constants:
    options = {"num_warps": 8, "enable_fp_fusion": False, "launch_pdl": pdl}
    return {"TOP_K": top_k, "BLOCK": block, "PDL": pdl}, options


@triton.jit
def _combine(
    rows,
    row_map,
    weights,
    out,
    scaling_factor,
    width,
    stride,
    stride_mt,
    stride_mk,
    stride_wt,
    stride_wk,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # The launch in front writes rows alone: where they are, and their weights, can be read before it has ended.
    places = ()
    factors = ()
    for slot in tl.static_range(TOP_K):
        places += (tl.load(row_map + token * stride_mt + slot * stride_mk).to(tl.int64),)  # type: ignore[assignment]
        if weights is not None:
            weight = tl.load(weights + token * stride_wt + slot * stride_wk)
            factors += (weight.to(tl.float32),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        # Masked, not multiplied by zero: an undefined row may be NaN.
        limit = tl.where(places[slot] >= 0, width, 0)
        value = tl.load(rows + places[slot] * stride + columns, mask=columns < limit, other=0.0).to(tl.float32)
        if weights is not None:
            value = value * factors[slot]
        total += tl.where(columns < limit, value, 0.0)
    # A product with 1 is exact.
    total *= scaling_factor
    tl.store(out + token.to(tl.int64) * width + columns, narrow(total, out.dtype.element_ty), mask=columns < width)


_launches = Launches(_combine)
