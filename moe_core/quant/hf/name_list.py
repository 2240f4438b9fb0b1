"""Lists of module names in configurations: what is not quantized, and what a rule is for.

The experts of a layer are alike, so a list that names single experts has to name all of them. Names that mean the whole
module are enough. Without such a name every expert is compared if their number is known and one is named in full; else
some are: the first, those whose numbers the list writes out or begins, and some of every length. A list that names some
of them and others not is an error, and so is one that only ever names experts one by one where nobody knows their
number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import attrs

from moe_core.quant.hf.pattern import Pattern, expression, wildcards
from moe_core.quant.hf.weight import Weight, number_of, without_container

#: Numbers of experts that are compared in any case.
_SAMPLE = (*range(12), 99, 100, 127, 255)


def is_listed(weight: Weight, entries: Iterable[str]) -> bool:
    """Whether a list speaks about a weight.

    An entry is a name (of the weight, of anything above it, or a part such as `mlp.experts` from anywhere in it), a
    name with shell wildcards, or a regular expression for the beginning of a name: marked by `re:`, or known by its
    characters, and then for whole parts of it. Names of single experts must mean all of them.

    Raises:
        SpecError: Not a regular expression, or it speaks about some experts and not about others.
    """
    return _compiled(tuple(entries)).has(weight)


def matches(weight: Weight, pattern: Pattern) -> bool:
    """Whether a pattern matches one of a weight's names from its beginning, alike in all experts."""
    match = pattern.compiled.match
    return pattern.may_mean(weight) and names_all(weight, lambda name: match(name) is not None, pattern.written)


def names_all(weight: Weight, is_named: Callable[[str], bool], written: Iterable[int]) -> bool:
    """Whether the weight has a name that is meant; in all experts or in none.

    Args:
        weight: Whom it is about.
        is_named: Whether a name is meant.
        written: Numbers that experts may be told apart by.

    Raises:
        SpecError: Some experts are named and others not.
    """
    if any(map(is_named, weight.names)):
        return True
    numbers = {*_SAMPLE, *written}
    if weight.num_experts is not None:
        numbers = {number for number in (*numbers, weight.num_experts - 1) if number < weight.num_experts}
    named = {number for number in numbers if any(map(is_named, weight.names_in(number)))}
    weight.require_alike(named, numbers - named)
    return bool(named)


@attrs.frozen
class _Compiled:
    """A list by how its entries are compared; `experts` is module -> numbers of single experts named in full."""

    names: frozenset[str]
    parts: frozenset[str]
    patterns: tuple[Pattern, ...]
    experts: Mapping[str, frozenset[int]]

    def has(self, weight: Weight) -> bool:
        singles = self.experts.get(without_container(weight.experts), frozenset())
        patterns = [pattern for pattern in self.patterns if pattern.may_mean(weight)]
        if singles and weight.num_experts is not None:
            singles |= frozenset(range(weight.num_experts))
        if any(map(self._has_name, {without_container(name) for name in weight.names})):
            return True

        def is_named(name: str) -> bool:
            if any(pattern.compiled.match(name) for pattern in patterns):
                return True
            return bool(singles) and self._has_name(without_container(name))

        return names_all(weight, is_named, singles.union(*(pattern.written for pattern in patterns)))

    def _has_name(self, name: str) -> bool:
        places = name.split(".")
        for start in range(len(places)):
            known = self.parts if start else self.names
            if any(".".join(places[start:end]) in known for end in range(start + 1, len(places) + 1)):
                return True
        return False


@lru_cache(maxsize=64)
def _compiled(entries: tuple[str, ...]) -> _Compiled:
    names: set[str] = set()
    patterns: list[Pattern] = []
    experts: dict[str, set[int]] = {}
    for entry in entries:
        plain = without_container(entry.rstrip("."))
        if _is_pattern(entry):
            patterns += _patterns(entry)
        else:
            names.add(plain)
            if single := re.fullmatch(r"(.+)\.(\d+)(?:\.\w+)?", plain):
                experts.setdefault(single[1], set()).add(number_of(single[2]))
    # A name with a number is that layer's: layers.0 is not layers.0 of the draft layers under mtp.
    parts = {name for name in names if not any(place.isdecimal() for place in name.split("."))}
    frozen = {key: frozenset(numbers) for key, numbers in experts.items()}
    return _Compiled(frozenset(names), frozenset(parts), tuple(patterns), frozen)


def _is_pattern(entry: str) -> bool:
    return entry.startswith("re:") or re.search(r"[\\^$+|(){}*?\[\]]", entry) is not None


def _patterns(entry: str) -> tuple[Pattern, ...]:
    if entry.startswith("re:"):
        return (expression(entry.removeprefix("re:")),)
    if entry.startswith(".*") or re.search(r"[\\^$+|(){}]", entry):
        return (expression(entry, r"(?:(?<=\.)|(?=\.)|$)"),)
    return (wildcards(entry), wildcards(f"{entry}.*"))
