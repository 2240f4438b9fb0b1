"""Dispatcher `none`: tokens stay on this rank; at most they are permuted.

With several ranks every rank has all tokens, computes its own experts and returns its part of the sum.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs
import torch

from moe_core.kernels import ops
from moe_core.kernels.checks import can_assert, checked_slots, named_once, renumbered
from moe_core.payloads import (
    TORCH_DTYPES,
    CombineFn,
    ContiguousTokens,
    DispatchFn,
    ExpertGroup,
    MaskedTokens,
    StandardTokens,
    Tensor,
)
from moe_core.plan import MoEPlan, Route
from moe_core.specs import TokenDtype
from moe_core.vocabulary import FLOAT_DTYPES

#: What undoes a local permutation: `row_map [T, K]` and the weights that combine applies, None if the input has them.
LocalHandle: TypeAlias = tuple[Tensor, Tensor | None]


class LocalIds:
    """Slots `[T, K]` and their weights -> ids of this rank's experts, -1 for those of other ranks, and the weights."""

    def __init__(self, plan: MoEPlan, group: ExpertGroup) -> None:
        """Look up this rank's slots."""
        self._num_slots, slots = plan.request.num_slots, plan.request.local_slots(group.rank)
        self._table: Tensor | None = None
        if len(slots) < self._num_slots:
            self._table = torch.full((self._num_slots,), -1, device=group.device)
            self._table[slots.start : slots.stop] = torch.arange(len(slots), device=group.device)

    def __call__(self, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """The local ids and the weights; slots out of range are as in `checks.checked_slots`."""
        if topk_ids.device.type != "cpu" and can_assert(topk_ids):
            # One launch.
            return ops.checked_ids(topk_ids, self._num_slots, self._table), topk_weights
        topk_ids, topk_weights = checked_slots(topk_ids, topk_weights, self._num_slots)
        return renumbered(topk_ids, self._table), topk_weights


@attrs.define(eq=False)
class LocalPermutation:
    """Tokens with local ids -> rows by expert, and back with the top-k weights.

    Attributes:
        num_local_experts: L.
        row_alignment: Rows per expert are padded to a multiple of it.
        weight_on_input: Whether the weights are applied before the experts instead of after.
        codes: What tokens are rounded to on the way, with scales along the rows; None for floats.
    """

    num_local_experts: int
    row_alignment: int
    weight_on_input: bool
    codes: TokenDtype | None

    def contiguous(
        self, hidden_states: Tensor, local_ids: Tensor, topk_weights: Tensor
    ) -> tuple[ContiguousTokens, LocalHandle]:
        """`[T, H]` -> rows grouped by expert."""
        on_input, on_output = self._sides(topk_weights)
        tokens, row_map = ops.permute_contiguous(
            self._to_move(hidden_states),
            local_ids,
            self.num_local_experts,
            alignment=self.row_alignment,
            row_weights=on_input,
            token_dtype=self._codes_of_tokens,
        )
        if self._codes_of_rows is not None:
            real = ops.row_experts(tokens.num_tokens_per_expert, tokens.group_ends, tokens.hidden_states.shape[0])
            tokens.hidden_states, tokens.scales = ops.quantize(tokens.hidden_states, self._codes_of_rows, real=real)
        return tokens, (row_map, on_output)

    def masked(
        self, hidden_states: Tensor, local_ids: Tensor, topk_weights: Tensor
    ) -> tuple[MaskedTokens, LocalHandle]:
        """`[T, H]` -> one block of rows per expert."""
        can_fail = can_assert(local_ids)
        if not can_fail:
            local_ids, topk_weights = named_once(local_ids, topk_weights)
        num_rows = self._rows_per_expert(local_ids)
        on_input, on_output = self._sides(topk_weights)
        tokens, row_map = ops.permute_masked(
            self._to_move(hidden_states),
            local_ids,
            self.num_local_experts,
            num_rows,
            row_weights=on_input,
            token_dtype=self._codes_of_tokens,
        )
        if self._codes_of_rows is not None:
            tokens.hidden_states, tokens.scales = ops.quantize(
                tokens.hidden_states, self._codes_of_rows, real=tokens.masked_m
            )
        if can_fail and (local_ids.device.type != "cpu" or torch.compiler.is_compiling()):
            torch._assert_async(
                (tokens.masked_m <= num_rows).all(), "an expert has more rows than tokens: repeated expert ids"
            )
        return tokens, (row_map, on_output)

    @property
    def _codes_of_tokens(self) -> TokenDtype | None:
        """What tokens are rounded to on the way, once each."""
        return None if self.weight_on_input else self.codes

    @property
    def _codes_of_rows(self) -> TokenDtype | None:
        """What rows are rounded to, once they have been multiplied by their weights."""
        return self.codes if self.weight_on_input else None

    def _to_move(self, hidden_states: Tensor) -> Tensor:
        # Codes that are made of weighted rows in a narrower dtype would be others.
        return hidden_states if self._codes_of_rows is None else hidden_states.float()

    def _sides(self, topk_weights: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The weights that multiply the experts' inputs, and those of their outputs: one of both."""
        return (topk_weights, None) if self.weight_on_input else (None, topk_weights)

    def _rows_per_expert(self, local_ids: Tensor) -> int:
        """M: exact where the host may look, else T, which suffices unless a token names an expert twice."""
        most = local_ids.shape[0]
        if local_ids.device.type == "cpu" and not torch.compiler.is_compiling() and local_ids.numel():
            # Counts of the ids -1, 0, 1, ..: the first is of slots without expert.
            most = int(torch.bincount(local_ids.reshape(-1) + 1, minlength=2)[1:].amax())
        return max(1, -(-most // self.row_alignment)) * self.row_alignment


def local_permutation(plan: MoEPlan, route: Route, group: ExpertGroup) -> LocalPermutation:
    """The permutation that one route needs on this rank."""
    return LocalPermutation(
        num_local_experts=len(plan.request.local_experts(group.rank)),
        row_alignment=route.row_alignment,
        weight_on_input=plan.request.weight_on_input,
        codes=None if route.token_dtype.dtype in FLOAT_DTYPES else route.token_dtype,
    )


def combine_rows(rows: Tensor, handle: LocalHandle, dtype: torch.dtype) -> Tensor:
    """Rows `[R, H]` or `[L, M, H]` -> `[T, H]` in `dtype`, weighted and summed in fp32."""
    row_map, topk_weights = handle
    return ops.combine(rows, row_map, topk_weights, dtype)


def bind_standard(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn]:
    """Tokens as they are; the runner does the rest."""
    local_ids = LocalIds(plan, group)

    def dispatch(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[StandardTokens, None]:
        ids, weights = local_ids(topk_ids, topk_weights)
        return StandardTokens(hidden_states=hidden_states, topk_ids=ids, topk_weights=weights), None

    def finish(rows: Tensor, handle: None) -> Tensor:
        return rows

    return dispatch, finish


def bind_contiguous(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn]:
    """Rows grouped by expert."""
    return _bind_local(plan, route, group, local_permutation(plan, route, group).contiguous)


def bind_masked(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn]:
    """A block of rows per expert."""
    return _bind_local(plan, route, group, local_permutation(plan, route, group).masked)


def _bind_local(plan: MoEPlan, route: Route, group: ExpertGroup, permuted: DispatchFn) -> tuple[DispatchFn, CombineFn]:
    local_ids = LocalIds(plan, group)
    dtype = TORCH_DTYPES[plan.request.dtype]

    def dispatch(
        hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[ContiguousTokens | MaskedTokens, LocalHandle]:
        return permuted(hidden_states, *local_ids(topk_ids, topk_weights))  # type: ignore[return-value]

    def finish(rows: Tensor, handle: LocalHandle) -> Tensor:
        return combine_rows(rows, handle, dtype)

    return dispatch, finish
