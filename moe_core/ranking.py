"""The order among feasible candidates, and what put each one in its place.

Prefer, then measurements, then the declared tier, then the name. Registration and import order never count.
"""

from __future__ import annotations

from moe_core.decision import DtypeChoice, Ranked
from moe_core.environment import Environment
from moe_core.measurements import MeasurementTable
from moe_core.request import LayerRequest, Workload
from moe_core.specs import Candidate, answers_to
from moe_core.vocabulary import TIERS


def rank(
    feasible: dict[Candidate, DtypeChoice],
    request: LayerRequest,
    workload: Workload,
    environment: Environment,
    measurements: MeasurementTable,
) -> tuple[Ranked, ...]:
    """Best first; each with the criterion that set it apart from the next one.

    Measurements rank only if the candidate that the tiers would choose was measured too: a slow kernel that
    happens to have been timed must not win over a faster one that was not.
    """
    by_tier = sorted(feasible, key=lambda c: (_preference(c, request), _tier(c), c.full_name))
    times = {c: measurements.lookup(request, environment, c, workload.max_tokens) for c in by_tier}
    use_times = bool(by_tier) and times[by_tier[0]] is not None

    def key(candidate: Candidate) -> tuple[int, float, int, str]:
        found = times[candidate] if use_times else None
        time = found[0] if found else float("inf")
        return _preference(candidate, request), time, _tier(candidate), candidate.full_name

    ordered = sorted(by_tier, key=key)
    keys = [key(candidate) for candidate in ordered]
    return tuple(
        Ranked(candidate=candidate, because=_because(candidate, index, keys, times, request), dtype=feasible[candidate])
        for index, candidate in enumerate(ordered)
    )


def _preference(candidate: Candidate, request: LayerRequest) -> int:
    for place, name in enumerate(request.prefer):
        if _is_named(candidate, name):
            return place
    return len(request.prefer)


def _is_named(candidate: Candidate, name: str) -> bool:
    parts = [part for part in (candidate.dispatcher, candidate.runner) if part is not None]
    return any(name == part.plugin or answers_to(name, part) for part in parts)


def _tier(candidate: Candidate) -> int:
    return -TIERS.index(candidate.runner.spec.tier)


def _because(
    candidate: Candidate,
    index: int,
    keys: list[tuple[int, float, int, str]],
    times: dict[Candidate, tuple[float, str] | None],
    request: LayerRequest,
) -> str:
    if len(keys) == 1:
        return "only candidate"
    # The last candidate is described by what sets it apart from the one before.
    neighbour = keys[index + 1] if index + 1 < len(keys) else keys[index - 1]
    preference, time, tier, _ = keys[index]
    if preference != neighbour[0]:
        return "prefer" if preference < len(request.prefer) else "not preferred"
    measured = times[candidate]
    if time != neighbour[1] and measured and time != float("inf"):
        return measured[1]
    if tier != neighbour[2] or time != neighbour[1]:
        return f"tier {candidate.runner.spec.tier}"
    return "tie broken by name"
