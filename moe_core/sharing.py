"""What the workloads of one layer must have in common: the weight layout, or the whole combination."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from moe_core.decision import Ranked, Reason, WorkloadDecision
from moe_core.request import LayerRequest


def in_step(request: LayerRequest, workloads: list[WorkloadDecision]) -> tuple[list[WorkloadDecision], Reason | None]:
    """Keep what all workloads can share: a weight layout, and for a deterministic request the whole combination."""

    def layout(entry: Ranked) -> str:
        return entry.candidate.runner.spec.weight_layout

    def combination(entry: Ranked) -> str:
        return f"{entry.candidate.full_name} ({entry.dtype.token_dtype})"

    # What the user prefers is above what was measured.
    by_time = not request.prefer
    workloads, reason = _share(workloads, layout, "weight-layout", "one weight layout for all workloads", by_time)
    if reason is None and request.deterministic:
        needs = "one combination for all workloads of a deterministic layer"
        workloads, reason = _share(workloads, combination, "determinism", needs, by_time)
    return workloads, reason


def _share(
    workloads: list[WorkloadDecision], trait: Callable[[Ranked], str], code: str, needs: str, by_time: bool
) -> tuple[list[WorkloadDecision], Reason | None]:
    """Narrow every workload to the trait that costs least over all of them, in whatever order they stand.

    Where times were measured and count, that is the slowdown against the fastest, else the place in the order.
    """
    places = [_places(decision.ranked, trait) for decision in workloads]
    shared = set.intersection(*(set(place) for place in places))
    if not shared:
        found = "; ".join(f"{d.workload.phase}: {', '.join(p)}" for d, p in zip(workloads, places, strict=True))
        return workloads, Reason(code, needs, found, "pin or prefer backends that have it in common")
    costs = [_costs(decision.ranked if by_time else (), trait) for decision in workloads]

    def order(value: str) -> tuple[float, int, str]:
        return sum(cost.get(value, math.inf) for cost in costs if cost), sum(place[value] for place in places), value

    best = min(shared, key=order)
    return [_only(decision, trait, best, code) for decision in workloads], None


def _places(ranked: tuple[Ranked, ...], trait: Callable[[Ranked], str]) -> dict[str, int]:
    places: dict[str, int] = {}
    for place, entry in enumerate(ranked):
        places.setdefault(trait(entry), place)
    return places


def _costs(ranked: tuple[Ranked, ...], trait: Callable[[Ranked], str]) -> dict[str, float]:
    """Per trait the logarithm of how much slower than the fastest it is; empty where no time counted."""
    times: dict[str, float] = {}
    for entry in ranked:
        if entry.microseconds is not None:
            times[trait(entry)] = min(times.get(trait(entry), math.inf), entry.microseconds)
    return {value: math.log(time / min(times.values())) for value, time in times.items()}


def _only(decision: WorkloadDecision, trait: Callable[[Ranked], str], value: str, code: str) -> WorkloadDecision:
    kept = tuple(entry for entry in decision.ranked if trait(entry) == value)
    if len(kept) == len(decision.ranked):
        return decision
    dropped = ", ".join(entry.candidate.full_name for entry in decision.ranked if trait(entry) != value)
    note = f"{code}: {value} serves all workloads; not used: {dropped}"
    return attrs.evolve(decision, ranked=kept, notes=(*decision.notes, note))
