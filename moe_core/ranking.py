"""The order among feasible candidates, and what put each one in its place.

Prefer, then measurements, then the declared tier, then (on one rank) tokens as they came before permuted ones, then
what never makes the host wait, then (on several ranks, for few tokens) tokens as they came again, then one call for
everything before a dispatcher and a runner, then the name.
Registration and import order never count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

from moe_core.declared import Candidate, answers_to, belongs_to
from moe_core.findings import BY_NAME, DtypeChoice, Place, Ranked
from moe_core.measurements import MeasuredTime, Measurement, times_at
from moe_core.request import LayerRequest
from moe_core.vocabulary import TIERS

#: How much faster something must be to take another's place; measured medians differ by less from run to run.
WORTH_A_RANGE = 0.03
_MEASURED = "measured"
#: How a preferred name is met, best first: by the runner, by what moves tokens, or by neither.
_BY_RUNNER, _BY_DISPATCHER, _UNMET = range(3)
#: Phases whose forwards have few tokens.
_FEW_TOKENS = ("decode", "verify")


def rank(
    feasible: Sequence[tuple[Candidate, DtypeChoice]],
    request: LayerRequest,
    phase: str,
    num_tokens: int | None,
    rows: Mapping[str, Sequence[Measurement]],
) -> tuple[Ranked, ...]:
    """Best first; each with the criterion that set it apart from the next one.

    `phase` is the workload's; `num_tokens` and `rows` are those of `rank_again`.
    """
    entries = [
        Ranked(
            candidate=candidate,
            because="",
            dtype=dtype,
            preferred=_preferred(candidate, request),
            place=_place(candidate, request, phase),
        )
        for candidate, dtype in feasible
    ]
    return rank_again(entries, request, num_tokens, rows)


def rank_again(
    entries: Iterable[Ranked], request: LayerRequest, num_tokens: int | None, rows: Mapping[str, Sequence[Measurement]]
) -> tuple[Ranked, ...]:
    """The same candidates in the order for a token count, None for an order without times.

    `rows` are what was measured of the layer. Its times rank only if the candidate that the tiers would choose was
    measured too, or one that its name alone sets behind it: a slow kernel that happens to have been timed must not win
    over a faster one that was not.
    """
    usual_first = by_place(entries)
    times = times_at(rows, request, [entry.candidate for entry in usual_first], num_tokens)
    times = _comparable(usual_first, times)
    timed = [
        (entry, time, time.microseconds if time else math.inf) for entry, time in zip(usual_first, times, strict=True)
    ]
    timed.sort(key=lambda each: (each[0].place.preference, each[2], each[0].place))
    order = [(entry.place, microseconds) for entry, _, microseconds in timed]
    return tuple(
        Ranked(
            candidate=entry.candidate,
            because=_because(index, order, time.provenance if time else ""),
            dtype=entry.dtype,
            preferred=entry.preferred,
            microseconds=time.microseconds if time else None,
            provenance=time.provenance if time else "",
            bounds=time.bounds if time else None,
            place=entry.place,
        )
        for index, (entry, time, _) in enumerate(timed)
    )


def _comparable(usual_first: Sequence[Ranked], times: Sequence[MeasuredTime | None]) -> list[MeasuredTime | None]:
    """The times that rank: those comparable with that of the first, or of what its name alone sets behind it."""
    # A name, which is last in a place, says nothing about speed.
    is_tied = [entry.place[:-1] == usual_first[0].place[:-1] for entry in usual_first]
    usual = next(filter(None, itertools.compress(times, is_tied)), None)
    return [time if time and usual and time.is_comparable(usual) else None for time in times]


def set_apart(ranked: Sequence[Ranked]) -> tuple[Ranked, ...]:
    """The same order, each entry with what sets it apart from its neighbour here; for an order that lost entries."""
    order = [(entry.place, math.inf if entry.microseconds is None else entry.microseconds) for entry in ranked]
    because = [_because(index, order, entry.provenance) for index, entry in enumerate(ranked)]
    return tuple(
        entry if entry.because == why else attrs.evolve(entry, because=why)
        for entry, why in zip(ranked, because, strict=True)
    )


def by_place(entries: Iterable[Ranked]) -> list[Ranked]:
    """The order if no time counted."""
    return sorted(entries, key=lambda entry: entry.place)


def pays(entry: Ranked, instead_of: Ranked) -> bool:
    """Whether times speak for a change: faster by `WORTH_A_RANGE`, and by more than the samples of both spread."""
    if entry.microseconds is None or instead_of.microseconds is None:
        return False
    is_faster = instead_of.microseconds > entry.microseconds * (1 + WORTH_A_RANGE)
    return is_faster and entry.is_told_from(instead_of)


def by_tier(candidates: Iterable[Candidate], request: LayerRequest, phase: str) -> list[Candidate]:
    """The order of candidates if no time counts."""
    return sorted(candidates, key=lambda candidate: _place(candidate, request, phase))


def is_users_order(ranked: Sequence[Ranked]) -> bool:
    """Whether prefer or a measurement made any difference, so that only a policy plugin may choose otherwise."""
    return any(entry.because == "prefer" or entry.because.startswith(_MEASURED) for entry in ranked)


def _place(candidate: Candidate, request: LayerRequest, phase: str) -> Place:
    tier = -TIERS.index(candidate.runner.spec.tier)
    permutes, is_alone = candidate.runner.spec.format in ("contiguous", "masked"), request.ep_size == 1
    # One rank has no tokens to move: what neither permutes nor pads them does less. Of tokens of other ranks this
    # counts where they are few.
    permutes_few = permutes and not is_alone and phase in _FEW_TOKENS
    dispatcher = candidate.dispatcher
    waits = not (candidate.runner.spec.graph_safe and (dispatcher is None or dispatcher.spec.graph_safe))
    preference, name = _preference(candidate, request), candidate.full_name
    return Place(preference, tier, permutes and is_alone, waits, permutes_few, dispatcher is not None, name)


def _preference(candidate: Candidate, request: LayerRequest) -> tuple[int, ...]:
    """Per preferred name how it is met, earlier names first; the smallest numbers are best.

    The runner comes first because a plugin's name means both: its dispatcher may serve other plugins' runners too.
    """
    return tuple(_how_met(name, candidate) for name in request.prefer)


def _preferred(candidate: Candidate, request: LayerRequest) -> tuple[str, ...]:
    """The same in words: the names that are met."""
    met = ((name, _how_met(name, candidate)) for name in request.prefer)
    return tuple(f"{name} (its dispatcher)" if how == _BY_DISPATCHER else name for name, how in met if how < _UNMET)


def _how_met(name: str, candidate: Candidate) -> int:
    runner, dispatcher = candidate.runner, candidate.dispatcher
    if name == runner.plugin or answers_to(name, runner):
        return _BY_RUNNER
    # A fused runner that moves tokens as a dispatcher does is preferred by that one's name no more than a pair with it.
    is_moved_so = name == runner.spec.a2a or (dispatcher is not None and belongs_to(name, dispatcher))
    return _BY_DISPATCHER if is_moved_so else _UNMET


def _because(index: int, order: list[tuple[Place, float]], provenance: str) -> str:
    """What sets one apart in an order of places and microseconds."""
    if len(order) == 1:
        return "only candidate"
    # The last candidate is described by what sets it apart from the one before.
    (place, microseconds), other = order[index], order[index + 1] if index + 1 < len(order) else order[index - 1]
    neighbour, neighbours_microseconds = other
    if place.preference != neighbour.preference:
        return "prefer" if min(place.preference) < _UNMET else "not preferred"
    if microseconds != neighbours_microseconds:
        return provenance or "not measured"
    if place.tier != neighbour.tier:
        return f"tier {TIERS[-place.tier]}"
    if place.permutes_alone != neighbour.permutes_alone:
        return "permutes tokens on one rank" if place.permutes_alone else "no permutation on one rank"
    if place.waits != neighbour.waits:
        return "the host may wait for the device" if place.waits else "the host never waits for the device"
    if place.permutes_few != neighbour.permutes_few:
        return "permutes few tokens" if place.permutes_few else "no permutation of few tokens"
    if place.is_pair != neighbour.is_pair:
        return "a dispatcher in front" if place.is_pair else "one call for everything"
    return BY_NAME
