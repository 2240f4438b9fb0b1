"""Ranges of token counts: a local layer gets a route of its own where measured times say that another one pays.

A workload is decided at every token count that was measured ("lanes"), and neighbouring lanes with one winner become a
range. Between two measured counts the nearest by ratio speaks, so that a range ends at their geometric middle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import attrs

from moe_core.declared import Candidate
from moe_core.environment import Environment
from moe_core.findings import Ranked, WorkloadDecision
from moe_core.measurements import COMPARABLE, MeasurementTable, is_saturated
from moe_core.ranking import WORTH_A_RANGE, pays, rank_again
from moe_core.request import LayerRequest


def lanes_of(
    decision: WorkloadDecision, request: LayerRequest, environment: Environment, measurements: MeasurementTable
) -> list[WorkloadDecision]:
    """The decision at each measured token count, in ascending order; alone where ranges are not for this layer.

    A deterministic layer has one route, so that a token's bits do not depend on its batch, and the route of a forward
    that communicates must not depend on one rank's token count.
    """
    if request.deterministic or request.is_multi_rank:
        return [decision]
    rows = measurements.of_layer(request, environment)
    names = [entry.candidate.full_name for entry in decision.ranked]
    counts = sorted({row.num_tokens for name in names for row in rows.get(name, ())})
    if not counts:
        return [decision]
    lanes: list[WorkloadDecision] = []
    for first, last, asked in _steps(counts, decision, request):
        able = _able(decision, first, last)
        if not able:
            # More tokens than any backend takes.
            break
        lanes.append(
            attrs.evolve(
                decision,
                workload=attrs.evolve(decision.workload, max_tokens=last),
                ranked=rank_again(able, request, asked, rows),
                min_tokens=first,
                notes=(*decision.notes, *(_gap(counts, first) if first > decision.min_tokens else ())),
            )
        )
    return lanes or [decision]


def _steps(
    counts: list[int], decision: WorkloadDecision, request: LayerRequest
) -> Iterator[tuple[int, int | None, int | None]]:
    """First and last token count of each lane, and the count to ask the measurements for (None: for none)."""
    first, end = decision.min_tokens, decision.workload.max_tokens
    for count, following in zip(counts, [*counts[1:], None], strict=True):
        last = _last(count, following, request)
        if last is not None and last < first:
            continue
        if end is not None and (last is None or last >= end):
            yield first, end, end
            return
        yield first, last, count
        if last is None:
            return
        first = last + 1
    yield first, end, None


def _last(count: int, following: int | None, request: LayerRequest) -> int | None:
    """The largest token count for which the measurements at `count` speak, None: any."""
    if following is None:
        return None if is_saturated(request, count) else count
    return last_before(count, following)


def last_before(count: int, following: int) -> int:
    """The largest token count for which times at `count` speak, and no longer those at the `following` one."""
    # Where both are equally near by ratio, the larger one speaks.
    return math.isqrt(count * following - 1)


def are_far(count: int, following: int) -> bool:
    """Whether times that cross between two measured counts say little about where."""
    return following > COMPARABLE * count


def _gap(counts: list[int], first: int) -> Iterator[str]:
    """What to know of a lane's beginning, if it lies between measured counts that are far from each other."""
    before, after = [count for count in counts if count < first], [count for count in counts if count >= first]
    if before and after and are_far(before[-1], after[0]):
        yield f"{first} tokens are the middle by ratio of T={before[-1]} and {after[0]}; none between was measured"


def _able(decision: WorkloadDecision, first: int, last: int | None) -> list[Ranked]:
    """What takes every token count of a lane; where nothing does, what takes the first."""
    for count in (last, first):
        able = [entry for entry in decision.ranked if _takes(entry, count)]
        if able:
            return able
    return []


def _takes(entry: Ranked, num_tokens: int | None) -> bool:
    """Whether the backends declare that many tokens."""
    limit = entry.candidate.declared_max_tokens
    return limit is None or (num_tokens is not None and num_tokens <= limit)


def ranges_of(lanes: list[WorkloadDecision]) -> list[WorkloadDecision]:
    """Neighbouring lanes with one winner joined; the winner stands first, and a note tells why a range begins."""
    ranges: list[WorkloadDecision] = []
    for lane in lanes:
        before = ranges[-1].ranked[0] if ranges else None
        usual = before.candidate if before else min(lane.ranked, key=lambda entry: entry.place).candidate
        chosen = _chosen(lane, usual)
        lane = _with_first(lane, chosen)
        if before is None:
            ranges.append(lane)
        elif chosen.candidate == before.candidate:
            # The order with times tells more than one by tiers.
            fuller = lane if chosen.microseconds is not None else ranges[-1]
            first, notes = ranges[-1].min_tokens, ranges[-1].notes
            ranges[-1] = attrs.evolve(fuller, workload=lane.workload, min_tokens=first, notes=notes)
        else:
            ranges.append(attrs.evolve(lane, notes=(*lane.notes, _why(lane, before))))
    return ranges


def _chosen(lane: WorkloadDecision, usual: Candidate) -> Ranked:
    """The fastest that pays instead of `usual`, or that one; the first of the lane where times do not compare them."""
    best, kept = lane.ranked[0], _entry(lane, usual)
    if kept is None or kept.microseconds is None or best.microseconds is None:
        return best
    faster = itertools.takewhile(lambda entry: entry is not kept, lane.ranked)
    return next((entry for entry in faster if pays(entry, kept)), kept)


def _entry(lane: WorkloadDecision, wanted: Candidate) -> Ranked | None:
    return next((entry for entry in lane.ranked if entry.candidate == wanted), None)


def _with_first(lane: WorkloadDecision, chosen: Ranked) -> WorkloadDecision:
    if chosen is lane.ranked[0]:
        return lane
    lead = f"less than {WORTH_A_RANGE:.0%}" if chosen.is_told_from(lane.ranked[0]) else "not told apart"
    # What set it apart in its old place says nothing in this one.
    because = f"{chosen.provenance}, {lead} from the fastest"
    others = (entry for entry in lane.ranked if entry is not chosen)
    return attrs.evolve(lane, ranked=(attrs.evolve(chosen, because=because), *others))


def _why(lane: WorkloadDecision, before: Ranked) -> str:
    chosen, left = lane.ranked[0], _entry(lane, before.candidate)
    begins = f"from {lane.min_tokens} tokens {chosen.candidate.full_name}"
    if left is None:
        return f"{begins}: {before.candidate.full_name} takes at most {before.candidate.declared_max_tokens}"
    if chosen.microseconds is None:
        return f"{begins}: nothing was measured there"
    if left.microseconds is None:
        return f"{begins}: {before.candidate.full_name} was not measured there"
    faster = left.microseconds / chosen.microseconds - 1
    return f"{begins}: {faster:.0%} faster than {before.candidate.full_name}"
