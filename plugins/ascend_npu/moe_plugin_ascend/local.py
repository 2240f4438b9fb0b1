"""Dispatcher `none`: the tokens of this rank, grouped by expert and summed again by two of the vendor's operators.

`npu_moe_init_routing_v2` maps slots to rows token by token; `npu_moe_finalize_routing` reads such a map slot by slot,
so that `npu_moe_token_unpermute` is its partner.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from moe_core.kernels.checks import checked_slots
from moe_core.payloads import CombineFn, ContiguousTokens, DispatchFn, ExpertGroup, Tensor
from moe_core.plan import MoEPlan, Route
from moe_plugin_ascend.operators import group_tokens, require_operators, weighted_sum

#: The row of each slot, int32 `[T, K]`, -1 for none, and the router weights `[T, K]`.
Handle: TypeAlias = tuple[Tensor, Tensor]


def bind_contiguous(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn]:
    """Rows grouped by expert, in bf16 or as int8 with a scale each."""
    num_slots, own = plan.request.num_slots, plan.request.local_slots(group.rank)
    to_int8 = route.token_dtype.dtype == "int8"
    require_operators()

    def dispatch(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[ContiguousTokens, Handle]:
        topk_ids, topk_weights = checked_slots(topk_ids, topk_weights, num_slots)
        # A slot without expert belongs to one more expert, that nobody has: every id is then a valid one.
        ids = torch.where(topk_ids < 0, num_slots, topk_ids).to(torch.int32)
        if ids.shape[0] == 0:
            return _nothing(hidden_states, len(own), to_int8), (ids, topk_weights)
        rows, row_map, counts, scales = group_tokens(hidden_states, ids, num_slots + 1, own, to_int8=to_int8)
        tokens = ContiguousTokens(
            hidden_states=rows,
            scales=scales,
            num_tokens_per_expert=counts.to(torch.int32),
            group_ends=counts.cumsum(0).to(torch.int32),
        )
        return tokens, (row_map.view(ids.shape), topk_weights)

    return dispatch, combine


def combine(rows: Tensor, handle: Handle) -> Tensor:
    """Rows `[R, H]` -> the weighted sums `[T, H]`; a slot without row adds nothing, whatever lies in memory."""
    row_map, topk_weights = handle
    if row_map.shape[0] == 0:
        return rows.new_empty((0, rows.shape[1]))
    has_row = row_map >= 0
    # Every slot must name a row, and undefined rows may be NaN, which no weight makes zero. A slot without one reads
    # another row of its own token, with weight zero; a token without any is set to zero afterwards.
    named = torch.where(has_row, row_map, row_map.amax(1, keepdim=True).clamp(min=0))
    weights = torch.where(has_row, topk_weights, 0).to(rows.dtype)
    summed = weighted_sum(rows, named.reshape(-1), weights)
    return torch.where(has_row.any(1, keepdim=True), summed, 0.0)


def _nothing(hidden_states: Tensor, num_experts: int, to_int8: bool) -> ContiguousTokens:
    """No token: nothing that the operators take."""
    counts = torch.zeros(num_experts, dtype=torch.int32, device=hidden_states.device)
    return ContiguousTokens(
        hidden_states=hidden_states.to(torch.int8) if to_int8 else hidden_states,
        scales=hidden_states.new_empty(0, dtype=torch.float32) if to_int8 else None,
        num_tokens_per_expert=counts,
        group_ends=counts,
    )
