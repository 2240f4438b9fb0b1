"""Byte n-gram models with interpolated modified Kneser-Ney smoothing: what the tiny model has to beat.

Method: Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling", 1998, section 3.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

_Counts = dict[bytes, Counter[int]]
_ALPHABET = 256


class _Context(NamedTuple):
    """What follows one context: discounted probability of each seen byte, and the mass left for shorter contexts."""

    probabilities: dict[int, float]
    backoff: float


class NgramModel:
    """Byte model of one order, made from training text.

    Args:
        text: training text.
        order: length of the n-grams in bytes, 1 = unigram; the longest context has `order - 1` bytes.
    """

    def __init__(self, text: bytes, order: int) -> None:
        """Count the n-grams of `text`; takes seconds for half a million bytes."""
        counts = _count(text, order)
        tables = [_discounted(counts)]
        for _ in range(order - 1):
            # A shorter context counts in how many longer ones a byte followed it, not how often.
            counts = _continuations(counts)
            tables.append(_discounted(counts))
        self._tables = tables[::-1]

    def probability(self, context: bytes, byte: int) -> float:
        """Probability of `byte` after `context`; sums to 1 over the 256 bytes. Never 0."""
        probability = 1 / _ALPHABET
        for length, table in enumerate(self._tables[: len(context) + 1]):
            entry = table.get(context[len(context) - length :])
            if entry is None:
                break
            probability = entry.probabilities.get(byte, 0.0) + entry.backoff * probability
        return probability

    def perplexity(self, text: bytes, positions: Iterable[int]) -> float:
        """Perplexity per byte over `positions` of `text`; the context is whatever stands before each."""
        reach = len(self._tables) - 1
        logs = [math.log(self.probability(text[max(0, i - reach) : i], text[i])) for i in positions]
        return math.exp(-math.fsum(logs) / len(logs))


def _count(text: bytes, order: int) -> _Counts:
    counts: _Counts = defaultdict(Counter)
    for end in range(order - 1, len(text)):
        counts[text[end - order + 1 : end]][text[end]] += 1
    return counts


def _continuations(longer: _Counts) -> _Counts:
    counts: _Counts = defaultdict(Counter)
    for context, followers in longer.items():
        counts[context[1:]].update(followers.keys())
    return counts


def _discounted(counts: _Counts) -> dict[bytes, _Context]:
    discounts = _discounts(counts)
    table = {}
    for context, followers in counts.items():
        total = followers.total()
        cut = {byte: discounts[min(count, 3)] for byte, count in followers.items()}
        probabilities = {byte: (count - cut[byte]) / total for byte, count in followers.items()}
        table[context] = _Context(probabilities, sum(cut.values()) / total)
    return table


def _discounts(counts: _Counts) -> tuple[float, float, float, float]:
    """Discounts of counts 0, 1, 2 and 3 or more, estimated from how many n-grams occur 1, 2, 3 and 4 times."""
    seen = Counter(count for followers in counts.values() for count in followers.values())
    if not seen[1]:
        return 0.0, 0.5, 0.5, 0.5  # a short text has no n-gram that occurs once; any value in (0, 1) is sound
    ratio = seen[1] / (seen[1] + 2 * seen[2])
    # Text that stands several times in the corpus can push an estimate out of (0, count); keep some mass to back off.
    estimates = (k - (k + 1) * ratio * seen[k + 1] / seen[k] if seen[k] else 0.5 for k in (1, 2, 3))
    one, two, more = (min(max(value, 0.05), k - 0.05) for k, value in enumerate(estimates, start=1))
    return 0.0, one, two, more
