"""What two rows of logits say about one token, in float64.

Letters: S positions, V vocabulary. Logits may have any float dtype and any additive constant per row; -inf is "never".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: float64 numbers of the rows that are worked on at a time: a vocabulary of 150,000 times a window needs gigabytes.
_NUMBERS_AT_A_TIME = 1 << 22


def log_likelihoods(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of the token that came.

    Args:
        logits: `[S, V]`.
        targets: `[S]` int64, the token that follows each position.

    Returns:
        `[S]` float64 nats, at most 0.
    """

    def part(rows: Tensor, ids: Tensor) -> Tensor:
        return rows.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0]

    return _by_rows(part, logits, targets)


def divergences(reference: Tensor, logits: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the model from the reference: sum of `p * log(p / q)`, p the reference's.

    Args:
        reference: `[S, V]` logits of p.
        logits: `[S, V]` logits of q.

    Returns:
        `[S]` float64 nats, at least 0 up to rounding; infinite where q excludes a token that p does not.
    """

    def part(reference_rows: Tensor, rows: Tensor) -> Tensor:
        log_p, log_q = reference_rows.double().log_softmax(-1), rows.double().log_softmax(-1)
        # Tokens that p excludes count nothing, also where q excludes them: inf - inf would be NaN.
        return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(-1)

    return _by_rows(part, reference, logits)


def same_top(reference: Tensor, logits: Tensor) -> Tensor:
    """`[S]` bool: whether both `[S, V]` rank the same token first."""
    return reference.argmax(-1) == logits.argmax(-1)


def _by_rows(function: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
    rows = max(1, _NUMBERS_AT_A_TIME // first.shape[-1])
    return torch.cat(
        [function(*parts) for parts in zip(torch.split(first, rows), torch.split(second, rows), strict=True)]
    )
