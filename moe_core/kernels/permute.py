"""Rows grouped by expert: where each (token, slot) goes, and the copies that put it there.

Everything is static in shape and free of host syncs, except that on CPU, outside compilation, the number of padded rows
is exact instead of a bound. The order is stable: inside an expert, tokens keep their order.
"""

from __future__ import annotations

import attrs
import torch
from torch.nn import functional

from moe_core.kernels.number_formats import movable
from moe_core.kernels.scale_layouts import empty_scales
from moe_core.payloads import ContiguousTokens, MaskedTokens, Tensor


@attrs.define(eq=False)
class Permutation:
    """Which row every slot has.

    Attributes:
        num_tokens_per_expert: `[L]` int32, real rows of each expert.
        group_ends: `[L]` int32, row after each expert's group, padded to the alignment.
        row_map: `[T, K]` int32, row of each slot, -1 for a slot without expert.
        num_rows: Rows to allocate: at least the last group end.
        order: `[T * K]` int64, the slots in the order of their rows and then those without, where no group is padded;
            None where it is not known.
    """

    num_tokens_per_expert: Tensor
    group_ends: Tensor
    row_map: Tensor
    num_rows: int
    order: Tensor | None = None


def max_rows(num_slots: int, num_experts: int, alignment: int) -> int:
    """Most rows that `num_slots` slots need when each expert's group is padded to `alignment`."""
    # The worst case gives every expert one row first; then each full `alignment` of further slots adds one tile.
    first = min(num_slots, num_experts)
    return alignment * (first + (num_slots - first) // alignment)


def permute(topk_ids: Tensor, num_experts: int, alignment: int = 1) -> Permutation:
    """Give every slot of `topk_ids` a row, grouped by local expert.

    Args:
        topk_ids: `[T, K]` int32 or int64, any strides, -1 = no expert; in range (`checks.check_ids`).
        num_experts: Local experts `L`.
        alignment: Every group is padded to a multiple of it.

    Returns:
        The permutation; an id twice in one row has two rows.
    """
    expert, order, counts = _sort_by_expert(topk_ids, num_experts)
    row = torch.arange(expert.numel(), device=expert.device, dtype=torch.int32)
    ends = counts.cumsum(0, dtype=torch.int32)
    if alignment > 1 and num_experts:
        padded = (counts + (alignment - 1)) // alignment * alignment
        padded_ends = padded.cumsum(0, dtype=torch.int32)
        # Position in sorted order, moved by the padding of the groups before.
        row += ((padded_ends - padded) - (ends - counts))[expert.clamp(max=num_experts - 1)]
        ends = padded_ends
    row = torch.where(expert < num_experts, row, -1)
    row_map = torch.empty_like(row).scatter_(0, order, row).view(topk_ids.shape)
    num_rows = _num_rows(topk_ids.numel(), num_experts, alignment, ends)
    return Permutation(counts, ends, row_map, num_rows, order if alignment == 1 else None)


def _sort_by_expert(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expert of each slot in sorted order (`num_experts` for none), the slots in that order, and counts `[L]` int32."""
    flat = topk_ids.reshape(-1)
    expert, order = torch.where(flat < 0, num_experts, flat).long().sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=flat.device)
    starts = torch.searchsorted(expert, bounds, out_int32=True)
    return expert, order, starts.diff()


def _num_rows(num_slots: int, num_experts: int, alignment: int, ends: Tensor) -> int:
    if alignment > 1 and num_experts and ends.device.type == "cpu" and not torch.compiler.is_compiling():
        return int(ends[-1])
    return max_rows(num_slots, num_experts, alignment)


def gather_rows(hidden_states: Tensor, permutation: Permutation) -> Tensor:
    """`[T, H]` -> `[R, H]`: each slot's token at its row. Rows without a slot hold some token, to be ignored."""
    return movable(hidden_states).index_select(0, _source(permutation)).view(hidden_states.dtype)


def gather_row_values(values: Tensor, permutation: Permutation) -> Tensor:
    """`[T, K]` per slot -> `[R]` per row, rows without a slot are undefined."""
    target = _target(permutation.row_map, permutation.num_rows)
    result = values.new_empty(permutation.num_rows + 1)
    return result.scatter_(0, target, values.reshape(-1))[:-1]


def masked_row_map(topk_ids: Tensor, num_experts: int, rows_per_expert: int) -> tuple[Tensor, Tensor]:
    """Rows of the masked format.

    Args:
        topk_ids: As in `permute`.
        num_experts: Local experts `L`.
        rows_per_expert: `M`: `T * K` always suffices, `T` without duplicated ids.

    Returns:
        `row_map [T, K]` int32 into the flattened `[L * M]` rows, -1 for none, and `masked_m [L]` int32. A slot whose
        block is full has no row either; the count exceeds `M` then.
    """
    expert, order, counts = _sort_by_expert(topk_ids, num_experts)
    if num_experts == 0:
        return torch.full(topk_ids.shape, -1, dtype=torch.int32, device=topk_ids.device), counts
    local = expert.clamp(max=num_experts - 1)
    starts = counts.cumsum(0, dtype=torch.int32) - counts
    within = torch.arange(expert.numel(), device=expert.device, dtype=torch.int32) - starts[local]
    has_row = (expert < num_experts) & (within < rows_per_expert)
    row = torch.where(has_row, local.int() * rows_per_expert + within, -1)
    return torch.empty_like(row).scatter_(0, order, row).view(topk_ids.shape), counts


def gather_masked(hidden_states: Tensor, row_map: Tensor, num_experts: int, rows_per_expert: int) -> Tensor:
    """`[T, H]` -> `[L, M, H]` by a `masked_row_map`; rows past `masked_m` are undefined."""
    num_rows = num_experts * rows_per_expert
    values = movable(hidden_states)
    rows = values.new_empty((num_rows + 1, values.shape[1]))
    token = torch.arange(row_map.shape[0], device=row_map.device).repeat_interleave(row_map.shape[1])
    # Only rows with a slot are written: a block has far more rows than tokens.
    rows.index_copy_(0, _target(row_map, num_rows), values.index_select(0, token))
    return rows[:-1].view(hidden_states.dtype).view(num_experts, rows_per_expert, values.shape[1])


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
) -> tuple[ContiguousTokens, Tensor]:
    """As `ops.permute_contiguous`."""
    permutation = permute(topk_ids, num_experts, alignment)
    if num_rows is not None:
        permutation.num_rows = num_rows
    rows = gather_rows(hidden_states, permutation)
    if row_weights is not None:
        rows = (rows * gather_row_values(row_weights.float(), permutation)[:, None]).to(rows.dtype)
    tokens = ContiguousTokens(
        hidden_states=rows,
        num_tokens_per_expert=permutation.num_tokens_per_expert,
        group_ends=permutation.group_ends,
        scales=None if scales is None else _laid_out(gather_rows(scales, permutation), column_major),
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
) -> tuple[MaskedTokens, Tensor]:
    """As `ops.permute_masked`."""
    row_map, masked_m = masked_row_map(topk_ids, num_experts, rows_per_expert)
    size = num_experts, rows_per_expert
    rows = gather_masked(hidden_states, row_map, *size)
    if row_weights is not None:
        weights = gather_masked(row_weights.float().reshape(-1, 1), row_map.view(-1, 1), *size)
        rows = (rows * weights).to(rows.dtype)
    tokens = MaskedTokens(
        hidden_states=rows,
        masked_m=masked_m,
        expected_m=max(1, topk_ids.numel() // max(1, num_experts)),
        scales=None if scales is None else _laid_out(gather_masked(scales, row_map, *size), column_major),
    )
    return tokens, row_map


def row_experts(num_tokens_per_expert: Tensor, group_ends: Tensor, num_rows: int) -> Tensor:
    """As `ops.row_experts`."""
    row = torch.arange(num_rows, device=group_ends.device, dtype=torch.int32)
    num_experts = group_ends.shape[0]
    if num_experts == 0:
        return row.fill_(-1)
    expert = torch.searchsorted(group_ends, row, right=True, out_int32=True)
    last = expert.clamp(max=num_experts - 1)
    starts = functional.pad(group_ends[:-1], (1, 0))
    is_real = (expert < num_experts) & (row - starts[last] < num_tokens_per_expert[last])
    return torch.where(is_real, expert, -1)


def _laid_out(scales: Tensor, column_major: bool) -> Tensor:
    out = empty_scales(scales.shape[:-1], scales.shape[-1], scales.dtype, scales.device, column_major)
    return out.copy_(scales)


def _target(row_map: Tensor, num_rows: int) -> Tensor:
    """Row of each slot; slots without one share the spare row past the end."""
    flat = row_map.reshape(-1).long()
    return torch.where(flat < 0, num_rows, flat)


def _source(permutation: Permutation) -> Tensor:
    """Token of each row, some token where no slot has the row."""
    row_map, num_rows, order = permutation.row_map, permutation.num_rows, permutation.order
    if order is not None and num_rows <= order.shape[0]:
        return order[:num_rows].div(max(1, row_map.shape[1]), rounding_mode="trunc")
    token = torch.arange(row_map.shape[0], device=row_map.device).view(-1, 1).expand(row_map.shape)
    source = token.new_zeros(num_rows + 1)
    return source.scatter_(0, _target(row_map, num_rows), token.reshape(-1))[:-1]
