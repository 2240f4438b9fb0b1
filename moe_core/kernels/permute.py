"""Rows grouped by expert: where each (token, slot) goes, and the copies that put it there.

Everything is static in shape and free of host syncs, except that on CPU, outside compilation, the number of padded rows
is exact instead of a bound. The order is stable: inside an expert, tokens keep their order.
"""

from __future__ import annotations

import attrs
import torch

from moe_core.payloads import Tensor


@attrs.define(eq=False)
class Permutation:
    """Which row every slot has.

    Attributes:
        num_tokens_per_expert: `[L]` int32, real rows of each expert.
        group_ends: `[L]` int32, row after each expert's group, padded to the alignment.
        row_map: `[T, K]` int64, row of each slot, -1 for a slot without expert.
        num_rows: Rows to allocate: at least the last group end.
    """

    num_tokens_per_expert: Tensor
    group_ends: Tensor
    row_map: Tensor
    num_rows: int


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
    row = torch.arange(expert.numel(), device=expert.device)
    ends = counts.cumsum(0)
    if alignment > 1 and num_experts:
        padded = (counts + (alignment - 1)) // alignment * alignment
        padded_ends = padded.cumsum(0)
        # Position in sorted order, moved by the padding of the groups before.
        row += ((padded_ends - padded) - (ends - counts))[expert.clamp(max=num_experts - 1)]
        ends = padded_ends
    row = torch.where(expert < num_experts, row, -1)
    row_map = torch.empty_like(row).scatter_(0, order, row).view(topk_ids.shape)
    num_rows = _num_rows(topk_ids.numel(), num_experts, alignment, ends)
    return Permutation(counts.int(), ends.int(), row_map, num_rows)


def _sort_by_expert(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expert of each slot in sorted order (`num_experts` for none), the slots in that order, and counts `[L]` int64."""
    flat = topk_ids.reshape(-1)
    expert, order = torch.where(flat < 0, num_experts, flat).long().sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=flat.device)
    starts = torch.searchsorted(expert, bounds)
    return expert, order, starts.diff()


def _num_rows(num_slots: int, num_experts: int, alignment: int, ends: Tensor) -> int:
    if alignment > 1 and num_experts and ends.device.type == "cpu" and not torch.compiler.is_compiling():
        return int(ends[-1])
    return max_rows(num_slots, num_experts, alignment)


def gather_rows(hidden_states: Tensor, permutation: Permutation) -> Tensor:
    """`[T, H]` -> `[R, H]`: each slot's token at its row. Rows without a slot hold some token, to be ignored."""
    return hidden_states.index_select(0, _source(permutation.row_map, permutation.num_rows))


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
        rows_per_expert: `M`; no expert may have more rows (`T * K` always suffices, `T` without duplicated ids).

    Returns:
        `row_map [T, K]` int64 into the flattened `[L * M]` rows, -1 for none, and `masked_m [L]` int32.
    """
    expert, order, counts = _sort_by_expert(topk_ids, num_experts)
    if num_experts == 0:
        return torch.full(topk_ids.shape, -1, dtype=torch.int64, device=topk_ids.device), counts.int()
    local = expert.clamp(max=num_experts - 1)
    within = torch.arange(expert.numel(), device=expert.device) - (counts.cumsum(0) - counts)[local]
    row = torch.where(expert < num_experts, local * rows_per_expert + within, -1)
    return torch.empty_like(row).scatter_(0, order, row).view(topk_ids.shape), counts.int()


def gather_masked(hidden_states: Tensor, row_map: Tensor, num_experts: int, rows_per_expert: int) -> Tensor:
    """`[T, H]` -> `[L, M, H]` by a `masked_row_map`; rows past `masked_m` are undefined."""
    num_rows = num_experts * rows_per_expert
    rows = hidden_states.new_empty((num_rows + 1, hidden_states.shape[1]))
    token = torch.arange(row_map.shape[0], device=row_map.device).repeat_interleave(row_map.shape[1])
    # Only rows with a slot are written: a block has far more rows than tokens.
    rows.index_copy_(0, _target(row_map, num_rows), hidden_states.index_select(0, token))
    return rows[:-1].view(num_experts, rows_per_expert, hidden_states.shape[1])


def _target(row_map: Tensor, num_rows: int) -> Tensor:
    """Row of each slot; slots without one share the spare row past the end."""
    flat = row_map.reshape(-1)
    return torch.where(flat < 0, num_rows, flat)


def _source(row_map: Tensor, num_rows: int) -> Tensor:
    """Token of each row, some token where no slot has the row."""
    token = torch.arange(row_map.shape[0], device=row_map.device).view(-1, 1).expand(row_map.shape)
    source = token.new_zeros(num_rows + 1)
    return source.scatter_(0, _target(row_map, num_rows), token.reshape(-1))[:-1]
