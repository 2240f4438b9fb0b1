"""What the table of `moe-core tune` means for plans: what they take, where that changes, and what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from moe_core.decision import Decision
from moe_core.findings import WorkloadDecision
from moe_core.ranking import WORTH_A_RANGE
from moe_core.token_ranges import are_far

if TYPE_CHECKING:
    from moe_core.tuning.search import Step


def taken(decision: Decision, num_tokens: int) -> str:
    """Full name of what a plan takes for so many tokens, "" if nothing fits."""
    found = _range_of(decision, num_tokens)
    return found.ranked[0].candidate.full_name if found and found.ranked else ""


def changes(steps: Sequence[Step], decision: Decision, number: Callable[[str], str]) -> Iterator[str]:
    """Where a plan takes another one than for fewer tokens.

    Args:
        steps: What was measured, by ascending token counts.
        decision: What follows from it.
        number: Says which column of the table has a combination.
    """
    for few, many, begins in _changes(steps, decision):
        line = f"{number(taken(decision, few))} to {number(taken(decision, many))} from T={begins} on"
        if _is_guessed(few, many, begins):
            line += f", the middle by ratio of {few} and {many}: nothing between was measured"
        yield line


def surer(steps: Sequence[Step], decision: Decision, number: Callable[[str], str]) -> Iterator[str]:
    """What would tell more; arguments are those of `changes`."""
    for few, many, begins in _changes(steps, decision):
        if _is_guessed(few, many, begins):
            yield f"--tokens {begins}"
    if any(len(step.fastest) > 1 for step in steps):
        yield "more --repeats, or a quieter machine, where several are the fastest"


def _changes(steps: Sequence[Step], decision: Decision) -> Iterator[tuple[int, int, int]]:
    """Neighbouring counts at which a plan takes two different ones, and the count from which it takes the other."""
    for step, following in pairwise(steps):
        few, many = step.num_tokens, following.num_tokens
        found = _range_of(decision, many)
        if found is not None and taken(decision, few) != taken(decision, many):
            yield few, many, found.min_tokens


def _is_guessed(few: int, many: int, begins: int) -> bool:
    return few < begins < many and are_far(few, many)


def left_out(
    steps: Sequence[Step], decision: Decision, number: Callable[[str], str], keeps_weights: bool
) -> Iterator[str]:
    """Which of the fastest have weights in a layout that the plan does not use, where, and what would bring them.

    Arguments are those of `changes`, and whether the plan is for a model that keeps its weights.
    """
    counts: dict[str, list[str]] = {}
    for step in steps:
        if (best := _faster(step, taken(decision, step.num_tokens))) is not None:
            name, gain = best
            counts.setdefault(name, []).append(f"{gain:.0%} at T={step.num_tokens}")
    unshared = {candidate.full_name: candidate for found in decision.workloads for candidate in found.unshared}
    for name, gains in counts.items():
        if name not in unshared:
            continue
        runner = unshared[name].runner
        because = (
            f"which would be a copy beside the weights that the model keeps; who pins {runner.full_name} gets it, and "
            "a layer of its own (--shape) does by its times"
            if keeps_weights
            else f"all routes of a plan share one, and {decision.weight_layout} costs less over all token counts; who "
            f"prefers {runner.full_name} gets it for all of them"
        )
        yield (
            f"{number(name)} is faster by {', '.join(gains)}, and plans do not use it: it needs weight layout "
            f"{runner.spec.weight_layout}, {because}"
        )


def _faster(step: Step, usual: str) -> tuple[str, float] | None:
    """What is faster than `usual` for sure, and by how much; None if nothing is."""
    if usual not in step.timings or usual in step.fastest:
        return None
    best = step.fastest[0]
    gain = step.microseconds[usual] / step.microseconds[best] - 1
    return (best, gain) if gain > WORTH_A_RANGE else None


def _range_of(decision: Decision, num_tokens: int) -> WorkloadDecision | None:
    for found in decision.workloads:
        limit = found.workload.max_tokens
        if found.min_tokens <= num_tokens and (limit is None or num_tokens <= limit):
            return found
    return None
