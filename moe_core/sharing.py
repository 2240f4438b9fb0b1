"""What the workloads of one layer must have in common: the weight layout, or the whole combination."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from moe_core.findings import Ranked, Reason, WorkloadDecision
from moe_core.ranking import by_tier, pays, set_apart
from moe_core.request import LayerRequest


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
    """Narrow every workload to the trait that costs least over all of them, in whatever order they stand.

    Where times were measured and count, that is the slowdown against what would pay instead, else the place in the
    order without times: noise chooses no trait.
    """
    places = [_places(_without_times(decision, request), trait) for decision in workloads]
    shared = set.intersection(*(set(place) for place in places))
    if not shared:
        found = "; ".join(f"{d.phase}: {', '.join(p)}" for d, p in zip(workloads, places, strict=True))
        return workloads, Reason(code, needs, found, "pin or prefer backends that have it in common")
    # What the user prefers is above what was measured.
    costs = [_costs(() if request.prefer else decision.ranked, trait) for decision in workloads]

    def order(value: str) -> tuple[float, int, str]:
        return sum(cost.get(value, math.inf) for cost in costs if cost), sum(place[value] for place in places), value

    best = min(shared, key=order)
    kept = ([entry for entry in decision.ranked if trait(entry) == best] for decision in workloads)
    return [_only(d, k, f"{code}: {best}", request) for d, k in zip(workloads, kept, strict=True)], None


def _without_times(decision: WorkloadDecision, request: LayerRequest) -> Sequence[Ranked]:
    """The order if no time counted; that of what the user prefers as it is."""
    if request.prefer:
        return decision.ranked
    order = by_tier((entry.candidate for entry in decision.ranked), request, decision.phase)
    return sorted(decision.ranked, key=lambda entry: order.index(entry.candidate))


def _places(ranked: Sequence[Ranked], trait: Callable[[Ranked], str]) -> dict[str, int]:
    places: dict[str, int] = {}
    for place, entry in enumerate(ranked):
        places.setdefault(trait(entry), place)
    return places


def _costs(ranked: tuple[Ranked, ...], trait: Callable[[Ranked], str]) -> dict[str, float]:
    """Per trait the logarithm of how much slower its fastest is than what pays instead; empty where no time counted."""
    timed = [entry for entry in ranked if entry.microseconds is not None]
    fastest: dict[str, Ranked] = {}
    for entry in timed:
        fastest.setdefault(trait(entry), entry)
    return {value: max(_slowdown(entry, other) for other in timed) for value, entry in fastest.items()}


def _slowdown(entry: Ranked, other: Ranked) -> float:
    """Logarithm of how much faster `other` is, 0 where that does not pay."""
    return math.log((entry.microseconds or 1.0) / (other.microseconds or 1.0)) if pays(other, entry) else 0.0


def _only(decision: WorkloadDecision, kept: Sequence[Ranked], shared: str, request: LayerRequest) -> WorkloadDecision:
    """The decision with the entries that have what is shared."""
    if len(kept) == len(decision.ranked):
        return decision
    left_out = tuple(entry.candidate for entry in decision.ranked if entry not in kept)
    is_outranked = decision.ranked[0] not in kept
    is_news = is_outranked or len(request.workloads) > 1
    ranked = set_apart(kept, request, decision.phase)
    if not is_outranked:
        # It was first before, for the reason that it had then.
        ranked = (decision.ranked[0], *ranked[1:])
    place = ", first by rank" if is_outranked else ""
    more = f", and {len(left_out) - 1} more" if len(left_out) > 1 else ""
    note = f"{shared} serves all workloads; not used: {left_out[0].full_name}{place}{more}"
    return attrs.evolve(
        decision,
        ranked=ranked,
        unshared=(*decision.unshared, *left_out),
        outranked_by=shared if is_outranked else decision.outranked_by,
        # One workload whose first is kept has given nothing up.
        notes=(*decision.notes, note) if is_news else decision.notes,
    )
