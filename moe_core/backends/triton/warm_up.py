"""Compiling every kernel of a layer before the first request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from moe_core.payloads import TORCH_DTYPES

if TYPE_CHECKING:
    from moe_core.bound import BoundExperts


def token_counts(max_tokens: int) -> list[int]:
    """Token counts that between them need every kernel: the powers of two, and the end."""
    counts = [1 << power for power in range(max_tokens.bit_length()) if 1 << power < max_tokens]
    return [*counts, max_tokens]


def warm_up(experts: BoundExperts, max_tokens: int = 8192, progress: Callable[[int, int], None] | None = None) -> None:
    """Run a layer on random tokens until nothing is left to compile; layers of the same sizes share their kernels.

    Args:
        experts: The bound layer.
        max_tokens: Most tokens that a forward will bring; routes that take fewer are warmed up to their own limit.
        progress: Called with the runs that are done and the runs there are, after each.
    """
    request = experts.plan.request
    device = next(iter(experts.weights.tensors.values())).data.device
    # Routes of one phase are chosen by the count: each count once.
    runs = dict.fromkeys(
        (route.phase if len(experts.routes) > 1 else None, count)
        for route in experts.plan.routes
        for count in token_counts(min(max_tokens, route.max_tokens or max_tokens))
    )
    for done, (phase, count) in enumerate(runs, start=1):
        scores = torch.rand(count, request.num_experts, device=device)
        hidden_states = torch.randn(count, request.hidden_size, device=device).to(TORCH_DTYPES[request.dtype])
        experts(
            hidden_states, scores.topk(request.top_k).indices, torch.rand_like(scores[:, : request.top_k]), phase=phase
        )
        if progress is not None:
            progress(done, len(runs))
