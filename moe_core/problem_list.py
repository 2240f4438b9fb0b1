"""Problems with the tensors of a checkpoint, as lines of a message: what holds for many experts is said once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from moe_core.expert_names import expert_name

#: The expert's number in a name whose projection may be an unknown one.
_NUMBERED = re.compile(r"(?:.+\.)?experts\.(?P<expert>\d{1,9})\..+")
#: What a problem with the values of one expert begins with.
_ONE_EXPERT = re.compile(r"expert (?P<expert>\d{1,9}) has\b")


class Line(NamedTuple):
    """A line, and how many problems it stands for."""

    text: str
    num_problems: int


def folded(problems: Iterable[str]) -> list[Line]:
    """The problems in their order, those that differ in the expert alone together, where the first of them is.

    Args:
        problems: Each `name: what is wrong`.
    """
    alike: dict[str, list[tuple[int | None, str]]] = {}
    for problem in problems:
        every, expert = _of_every_expert(problem)
        alike.setdefault(every, []).append((expert, problem))
    return [Line(_line(every, of_experts), len(of_experts)) for every, of_experts in alike.items()]


def in_ranges(numbers: Iterable[int]) -> str:
    """`0-3, 5` for ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _line(every: str, of_experts: list[tuple[int | None, str]]) -> str:
    experts = {expert for expert, _ in of_experts if expert is not None}
    if len(experts) < 2:
        return of_experts[0][1]
    return f"experts {in_ranges(sorted(experts))}: {every}"


def _of_every_expert(problem: str) -> tuple[str, int | None]:
    """The problem with `*` for the expert, and the expert; the problem itself and None if it is not about one."""
    name, colon, said = problem.partition(": ")
    of_one = _ONE_EXPERT.match(said)
    of_each, its_own = (f"each has{said[of_one.end() :]}", int(of_one["expert"])) if of_one else (said, None)
    expert = _number_in(name)
    if expert is None:
        return (problem, None) if its_own is None else (f"{name}{colon}{of_each}", its_own)
    head, _, tail = name.rpartition(f".{expert}.")
    # Another number than the name's is what is wrong with this one.
    return f"{head}.*.{tail}{colon}{of_each if its_own == expert else said}", expert


def _number_in(name: str) -> int | None:
    parts = expert_name(name)
    if parts is not None:
        return parts.expert
    found = _NUMBERED.fullmatch(name)
    return int(found["expert"]) if found else None
