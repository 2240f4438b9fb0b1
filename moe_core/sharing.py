"""What the workloads of one layer must have in common: the weight layout, or the whole combination."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import attrs

from moe_core.findings import Ranked, Reason, WorkloadDecision
from moe_core.ranking import WORTH_A_RANGE, by_place, pays, set_apart
from moe_core.request import LayerRequest

_SERVES = "serves all workloads"
#: Logarithm of the largest factor that is told; more is nonsense of a file, which may be beyond all that floats hold.
_MOST_SLOWDOWN = 20.0


def in_step(request: LayerRequest, workloads: list[WorkloadDecision]) -> tuple[list[WorkloadDecision], Reason | None]:
    """Keep what all workloads can share: a weight layout, and for a deterministic request the whole combination."""

    def layout(entry: Ranked) -> str:
        return entry.candidate.runner.spec.weight_layout

    def combination(entry: Ranked) -> str:
        return f"{entry.candidate.full_name} ({entry.dtype.token_dtype})"

    needs = "one weight layout for all workloads"
    workloads, reason = _share(request, workloads, layout, "weight-layout", needs)
    if reason is None and request.deterministic:
        needs = "one combination for all workloads of a deterministic layer"
        workloads, reason = _share(request, workloads, combination, "determinism", needs)
    return workloads, reason


def _share(
    request: LayerRequest, workloads: list[WorkloadDecision], trait: Callable[[Ranked], str], code: str, needs: str
) -> tuple[list[WorkloadDecision], Reason | None]:
    """Narrow every workload to one trait, in whatever order they stand.

    It is the first in the order without times, unless another is faster by `WORTH_A_RANGE`: over all of them together,
    as each may gain less than that; what their samples do not tell apart counts for nothing. Above that is what the
    user prefers: only traits of the most preferred are compared. Where these have none in common all are, by their
    places alone, which begin with what is preferred.
    """
    preferred = [decision.alike_preferred for decision in workloads]
    is_common = bool(_common(preferred, trait))
    compared = preferred if is_common else [decision.ranked for decision in workloads]
    costs = [_costs(entries, trait) for entries in compared] if is_common else []
    shared = _common(compared, trait)
    places = [_places(by_place(entries), trait) for entries in compared]
    if not shared:
        found = "; ".join(f"{d.phase}: {', '.join(p)}" for d, p in zip(workloads, places, strict=True))
        return workloads, Reason(code, needs, found, "pin or prefer backends that have it in common")

    def cost(value: str) -> float:
        return sum(of.get(value, math.inf) for of in costs if of)

    def place(value: str) -> tuple[int, str]:
        return sum(of[value] for of in places), value

    usual, fastest = min(shared, key=place), min(shared, key=lambda value: (cost(value), place(value)))
    slowdown = cost(usual) - cost(fastest) if fastest != usual else 0.0
    # What has no time where others have one is infinitely slow.
    gain = math.inf if math.isinf(slowdown) else math.exp(min(slowdown, _MOST_SLOWDOWN)) - 1
    best = fastest if gain > WORTH_A_RANGE else usual
    because = _because(usual, fastest, gain, sum(map(bool, costs)))
    # One workload whose first is kept at every count has given nothing up.
    is_news = len(request.workloads) > 1 or any(trait(decision.ranked[0]) != best for decision in workloads)

    def is_kept(entry: Ranked) -> bool:
        return trait(entry) == best

    only = partial(_only, is_kept, shared=f"{code}: {best}", because=because, is_news=is_news)
    return [only(decision) for decision in workloads], None


def _common(orders: Sequence[Sequence[Ranked]], trait: Callable[[Ranked], str]) -> set[str]:
    return set.intersection(*({trait(entry) for entry in order} for order in orders))


def _because(usual: str, fastest: str, gain: float, num_measured: int) -> str:
    """What speaks for the trait that is shared: what tiers would choose, or the fastest over the measured counts."""
    over = f"over {num_measured} measured token counts together"
    if math.isinf(gain):
        return f"was measured where {usual} was not"
    if gain > WORTH_A_RANGE:
        return f"is {gain:.0%} faster than {usual} {over}"
    if gain > 0:
        return f"is kept: {fastest} is {gain:.1%} faster {over}, less than {WORTH_A_RANGE:.0%}"
    return _SERVES


def _places(ranked: Sequence[Ranked], trait: Callable[[Ranked], str]) -> dict[str, int]:
    places: dict[str, int] = {}
    for place, entry in enumerate(ranked):
        places.setdefault(trait(entry), place)
    return places


def _costs(ranked: Sequence[Ranked], trait: Callable[[Ranked], str]) -> dict[str, float]:
    """Per trait the logarithm of how much slower its fastest is than what is; empty where no time counted."""
    timed = [entry for entry in ranked if entry.microseconds is not None]
    fastest: dict[str, Ranked] = {}
    for entry in timed:
        fastest.setdefault(trait(entry), entry)
    return {value: max(_slowdown(entry, other) for other in timed) for value, entry in fastest.items()}


def _slowdown(entry: Ranked, other: Ranked) -> float:
    """Logarithm of how much faster `other` is, 0 where samples do not tell it, or say nothing and it does not pay."""
    is_sure = entry.bounds is not None and other.bounds is not None and entry.is_told_from(other)
    # Not of the quotient, which may be 0 or infinity.
    ratio = math.log(entry.microseconds or 1.0) - math.log(other.microseconds or 1.0)
    return max(0.0, ratio) if is_sure or pays(other, entry) else 0.0


def _only(
    is_kept: Callable[[Ranked], bool],
    decision: WorkloadDecision,
    *,
    shared: str,
    because: str,
    is_news: bool,
) -> WorkloadDecision:
    """The decision with the entries that have what is shared."""
    left_out = tuple(entry.candidate for entry in decision.ranked if not is_kept(entry))
    if not left_out:
        return decision
    is_outranked = not is_kept(decision.ranked[0])
    ranked = set_apart([entry for entry in decision.ranked if is_kept(entry)])
    if not is_outranked:
        # It was first before, for the reason that it had then.
        ranked = (decision.ranked[0], *ranked[1:])
    place = ", first by rank" if is_outranked and because == _SERVES else ""
    more = f", and {len(left_out) - 1} more" if len(left_out) > 1 else ""
    note = f"{shared} {because}; not used: {left_out[0].full_name}{place}{more}"
    return attrs.evolve(
        decision,
        ranked=ranked,
        unshared=(*decision.unshared, *left_out),
        outranked_by=shared if is_outranked else decision.outranked_by,
        outranked_because=because if is_outranked else decision.outranked_because,
        notes=(*decision.notes, note) if is_news else decision.notes,
    )
