"""Rows back to tokens: the weighted sum over a token's slots."""

from __future__ import annotations

import torch

from moe_core.payloads import Tensor


def combine(
    rows: Tensor,
    row_map: Tensor,
    topk_weights: Tensor | None,
    dtype: torch.dtype,
    *,
    scaling_factor: float = 1.0,
    complete: bool = False,
) -> Tensor:
    """Sum each token's rows, in slot order, in fp32, rounded once.

    Product and sum are separate roundings (no fused multiply-add), so that a token's result depends on nothing but
    its own rows and weights.

    Args:
        rows: `[R, H]`, any float dtype; rows that no slot names are not read.
        row_map: `[T, K]` int32 or int64, row of each slot, -1 = none: skipped, whatever its weight.
        topk_weights: `[T, K]`, used as fp32; None when the rows are already weighted.
        dtype: Of the result.
        scaling_factor: Multiplies the sum, before it is rounded.
        complete: The caller knows that no slot is -1; saves the masking.

    Returns:
        `[T, H]`; zeros for a token without any row.
    """
    num_tokens, top_k = row_map.shape
    if rows.shape[0] == 0 or top_k == 0:
        return rows.new_zeros((num_tokens, rows.shape[1]), dtype=dtype)
    index = row_map if complete else row_map.clamp(min=0)
    # index_select makes fresh memory, so that writing into `values` touches no input.
    values = rows.index_select(0, index.reshape(-1)).view(num_tokens, top_k, rows.shape[1]).float()
    if topk_weights is not None:
        values.mul_(topk_weights.float().unsqueeze(-1))
    if not complete:
        # Not a product with zero: an undefined row may be NaN.
        values = torch.where((row_map >= 0).unsqueeze(-1), values, 0.0)
    result = values[:, 0]
    for slot in range(1, top_k):
        result.add_(values[:, slot])
    if scaling_factor != 1.0:
        result.mul_(scaling_factor)
    return result.to(dtype, memory_format=torch.contiguous_format, copy=top_k > 1)
