"""Tokens that a transport brings from other ranks, given to experts that want them grouped or in blocks."""

from __future__ import annotations

from typing import Any, Protocol

from moe_core.backends.torch.local import LocalHandle, combine_rows
from moe_core.payloads import TORCH_DTYPES, CombineFn, DispatchFn, MaskedTokens, StandardTokens, Tensor
from moe_core.plan import MoEPlan


class Transport(Protocol):
    """Brings tokens with local ids to this rank, and this rank's sums of them back."""

    def dispatch(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[StandardTokens, Any]:
        """`[T, H]` of this rank -> `[R, H]` with local ids `[R, K]`, and what `combine` needs of this dispatch."""

    def combine(self, sums: Tensor, sent: Any) -> Tensor:
        """Weighted sums `[R, H]` in the layer's dtype -> `[T, H]`."""


def bind_permuted(plan: MoEPlan, transport: Transport, permute: DispatchFn) -> tuple[DispatchFn, CombineFn]:
    """Dispatch and combine over a transport, with a permutation on this rank behind it.

    Args:
        plan: Names the layer's dtype.
        transport: Of tokens as they came.
        permute: `contiguous` or `masked` of a `LocalPermutation`.
    """
    dtype = TORCH_DTYPES[plan.request.dtype]

    def dispatch(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Any, tuple[LocalHandle, Any]]:
        received, sent = transport.dispatch(hidden_states, topk_ids, topk_weights)
        tokens, handle = permute(received.hidden_states, received.topk_ids, received.topk_weights)
        if isinstance(tokens, MaskedTokens) and received.expected_m is not None:
            tokens.expected_m = received.expected_m
        return tokens, (handle, sent)

    def finish(rows: Tensor, handle: tuple[LocalHandle, Any]) -> Tensor:
        permuted, sent = handle
        return transport.combine(combine_rows(rows, permuted, dtype), sent)

    return dispatch, finish
