"""The experts on each token format: both projections, what is between them, and what comes after."""

from __future__ import annotations

import torch

from moe_core.kernels.blocks import rows_per_block
from moe_core.kernels.combine import combine
from moe_core.kernels.expert_weights import Experts
from moe_core.kernels.grouped import Groups, grouped_linear, make_blocks, make_groups
from moe_core.kernels.one_token import experts_of_one_token, takes_one_token
from moe_core.kernels.permute import Permutation, gather_row_values, gather_rows, permute, row_experts
from moe_core.payloads import ActivationFn, Tensor


@torch.no_grad()
def experts_standard(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts) -> Tensor:
    """Tokens as they came -> their weighted sums.

    Args:
        hidden_states: `[T, H]` in the layer's dtype.
        topk_ids: `[T, K]` local ids, -1 = no expert; in range.
        topk_weights: `[T, K]`, used as fp32.
        experts: The local experts.

    Returns:
        `[T, H]` in the layer's dtype; zeros for a token without local expert.
    """
    if takes_one_token(hidden_states, experts):
        return experts_of_one_token(hidden_states, topk_ids, topk_weights, experts)
    permutation, groups = _grouped(topk_ids, experts)
    rows = gather_rows(hidden_states, permutation)
    weights: Tensor | None = topk_weights
    if experts.weight_on_input:
        row_weights = gather_row_values(topk_weights.float(), permutation)
        rows, weights = experts.w13.rounder.weighted(rows, row_weights[:, None]), None
    out = _rows_of_experts(rows, groups, experts)
    complete = groups.on_host is not None and sum(end - start for _, start, end in groups.on_host) == topk_ids.numel()
    return combine(out, permutation.row_map, weights, hidden_states.dtype, complete=complete)


@torch.no_grad()
def experts_contiguous(rows: Tensor, num_tokens_per_expert: Tensor, group_ends: Tensor, experts: Experts) -> Tensor:
    """Rows grouped by expert -> unweighted rows of the same shape.

    Args:
        rows: `[R, H]`; rows past a group's count are undefined.
        num_tokens_per_expert: `[L]` int32.
        group_ends: `[L]` int32, each group padded to the alignment.
        experts: The local experts.

    Returns:
        `[R, H]` in the dtype of `rows` (fp32 for fp16, whose largest number an unweighted row may exceed);
        rows past a group's count are undefined.
    """
    if experts.takes_blocks:
        out = _rows_in_blocks(rows, num_tokens_per_expert, group_ends, experts)
    else:
        out = _padded_rows(rows, make_groups(num_tokens_per_expert, group_ends), experts)
    return _narrow(out, rows.dtype)


@torch.no_grad()
def experts_masked(rows: Tensor, masked_m: Tensor, experts: Experts) -> Tensor:
    """One block of rows per expert -> unweighted rows of the same shape.

    Args:
        rows: `[L, M, H]`; rows past `masked_m` are undefined.
        masked_m: `[L]` int32.
        experts: The local experts.

    Returns:
        `[L, M, H]`, dtype as in `experts_contiguous`; rows past `masked_m` are undefined.
    """
    num_experts, block, hidden_size = rows.shape
    group_ends = torch.arange(1, num_experts + 1, device=rows.device, dtype=torch.int32) * block
    flat = rows.reshape(-1, hidden_size)
    if experts.takes_blocks:
        # Counts are bounded by the blocks' sizes alone, so that all rows are computed whatever there is in them.
        out = _rows_of_experts(flat, make_blocks(masked_m, group_ends, flat.shape[0], max(1, block)), experts)
    else:
        out = _padded_rows(flat, make_groups(masked_m, group_ends), experts)
    return _narrow(out, rows.dtype).view(num_experts, block, out.shape[1])


def _narrow(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows if dtype == torch.float16 else rows.to(dtype)


def _grouped(ids: Tensor, experts: Experts) -> tuple[Permutation, Groups]:
    """A row for every slot of `ids [T, K]`, as the products of these experts want them."""
    num_experts = experts.num_experts
    if not experts.takes_blocks:
        permutation = permute(ids, num_experts)
        return permutation, make_groups(permutation.num_tokens_per_expert, permutation.group_ends)
    block = rows_per_block(ids.numel(), num_experts)
    permutation = permute(ids, num_experts, block)
    counts, ends = permutation.num_tokens_per_expert, permutation.group_ends
    return permutation, make_blocks(counts, ends, permutation.num_rows, block)


def _rows_in_blocks(rows: Tensor, num_tokens_per_expert: Tensor, group_ends: Tensor, experts: Experts) -> Tensor:
    """As `_rows_of_experts`: each row is a token of one expert, and goes to a block and back."""
    ids = row_experts(num_tokens_per_expert, group_ends, rows.shape[0])[:, None]
    permutation, groups = _grouped(ids, experts)
    out = _rows_of_experts(gather_rows(rows, permutation), groups, experts)
    return out.index_select(0, permutation.row_map[:, 0].clamp(min=0))


def _padded_rows(rows: Tensor, groups: Groups, experts: Experts) -> Tensor:
    """As `_rows_of_experts`; where host sizes are known, undefined rows cost nothing."""
    if groups.on_host is None:
        return _rows_of_experts(rows, groups, experts)
    num_real = sum(end - start for _, start, end in groups.on_host)
    if num_real == rows.shape[0]:
        return _rows_of_experts(rows, groups, experts)
    real = torch.cat([rows[start:end] for _, start, end in groups.on_host]) if num_real else rows[:0]
    counts = groups.num_tokens_per_expert
    compact = make_groups(counts, counts.cumsum(0, dtype=torch.int32))
    result = _rows_of_experts(real, compact, experts)
    out = result.new_empty((rows.shape[0], result.shape[1]))
    for (_, start, end), (_, first, last) in zip(groups.on_host, compact.on_host or (), strict=True):
        out[start:end] = result[first:last]
    return out


def _rows_of_experts(rows: Tensor, groups: Groups, experts: Experts) -> Tensor:
    if experts.num_experts == 0:
        return rows.new_zeros((rows.shape[0], experts.w2.num_outputs))
    hidden = grouped_linear(rows, groups, experts.w13, experts.deterministic)
    hidden = _apply(experts.activation, hidden, experts.deterministic)
    out = grouped_linear(hidden, groups, experts.w2, experts.deterministic)
    return out if experts.post_norm is None else _apply(experts.post_norm, out, experts.deterministic)


def _apply(function: ActivationFn, rows: Tensor, by_row: bool) -> Tensor:
    # Vectorized functions treat the last elements of a tensor differently; a row alone is always the same tensor.
    return torch.cat([function(row) for row in torch.split(rows, 1)]) if by_row and rows.shape[0] else function(rows)
