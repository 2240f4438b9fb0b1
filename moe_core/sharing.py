"""What the workloads of one layer must have in common: the weight layout, or the whole combination."""

from __future__ import annotations

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

    workloads, reason = _share(workloads, layout, "weight-layout", "one weight layout for all workloads")
    if reason is None and request.deterministic:
        needs = "one combination for all workloads of a deterministic layer"
        workloads, reason = _share(workloads, combination, "determinism", needs)
    return workloads, reason


def _share(
    workloads: list[WorkloadDecision], trait: Callable[[Ranked], str], code: str, needs: str
) -> tuple[list[WorkloadDecision], Reason | None]:
    """Narrow every workload to the trait that has the best places over all of them, in whatever order they stand."""
    places = [_places(decision.ranked, trait) for decision in workloads]
    shared = set.intersection(*(set(place) for place in places))
    if not shared:
        found = "; ".join(f"{d.workload.phase}: {', '.join(p)}" for d, p in zip(workloads, places, strict=True))
        return workloads, Reason(code, needs, found, "pin or prefer backends that have it in common")
    best = min(shared, key=lambda value: (sum(place[value] for place in places), value))
    return [_only(decision, trait, best, code) for decision in workloads], None


def _places(ranked: tuple[Ranked, ...], trait: Callable[[Ranked], str]) -> dict[str, int]:
    places: dict[str, int] = {}
    for place, entry in enumerate(ranked):
        places.setdefault(trait(entry), place)
    return places


def _only(decision: WorkloadDecision, trait: Callable[[Ranked], str], value: str, code: str) -> WorkloadDecision:
    kept = tuple(entry for entry in decision.ranked if trait(entry) == value)
    if len(kept) == len(decision.ranked):
        return decision
    dropped = ", ".join(entry.candidate.full_name for entry in decision.ranked if trait(entry) != value)
    note = f"{code}: {value} serves all workloads; not used: {dropped}"
    return attrs.evolve(decision, ranked=kept, notes=(*decision.notes, note))
