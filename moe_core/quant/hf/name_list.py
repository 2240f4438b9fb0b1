"""Lists of module names in configurations: what is not quantized, and what a rule is for."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

import attrs

from moe_core.errors import SpecError
from moe_core.expert_names import PROJECTIONS
from moe_core.quant.hf.weight import Weight, without_container


def is_listed(weight: Weight, entries: Iterable[str]) -> bool:
    """Whether a list speaks about a weight.

    An entry is a name (of the weight, of anything above it, or a part such as `mlp.experts` from anywhere in it), a
    name with shell wildcards, or a regular expression for the beginning of a name: marked by `re:`, or known by its
    characters, and then for whole parts of it. Names of single experts must mean all of them.

    Raises:
        SpecError: Not a regular expression, or it speaks about some experts and not about the first.
    """
    return _compiled(tuple(entries)).has(weight)


def matches(weight: Weight, pattern: str) -> bool:
    """Whether a regular expression matches one of a weight's names from its beginning."""
    expression = _expression(pattern)
    return any(expression.match(name) for name in weight.names)


@attrs.frozen
class _Compiled:
    """A list by how its entries are compared; `experts` is (module, projection) -> numbers of single experts."""

    names: frozenset[str]
    parts: frozenset[str]
    expressions: tuple[re.Pattern[str], ...]
    experts: Mapping[tuple[str, str], frozenset[int]]

    def has(self, weight: Weight) -> bool:
        if any(map(self._has_name, {without_container(name) for name in weight.names})):
            return True
        if any(expression.match(name) for expression in self.expressions for name in weight.names):
            return True
        for leaf in PROJECTIONS[weight.half]:
            if numbers := self.experts.get((without_container(weight.experts), leaf)):
                raise weight.error(f"names expert {min(numbers)} and not expert 0; the experts of a layer must agree")
        return False

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
    expressions: list[re.Pattern[str]] = []
    experts: dict[tuple[str, str], set[int]] = {}
    for entry in entries:
        plain = without_container(entry.rstrip("."))
        if _is_pattern(entry):
            expressions += _patterns(entry)
        else:
            names.add(plain)
            if single := re.fullmatch(r"(.+)\.(\d+)\.(\w+)", plain):
                experts.setdefault((single[1], single[3]), set()).add(int(single[2]))
    # A name with a number is that layer's: layers.0 is not layers.0 of the draft layers under mtp.
    parts = {name for name in names if not any(place.isdecimal() for place in name.split("."))}
    frozen = {key: frozenset(numbers) for key, numbers in experts.items()}
    return _Compiled(frozenset(names), frozenset(parts), tuple(expressions), frozen)


def _is_pattern(entry: str) -> bool:
    return entry.startswith("re:") or re.search(r"[\\^$+|(){}*?\[\]]", entry) is not None


def _patterns(entry: str) -> tuple[re.Pattern[str], ...]:
    if entry.startswith("re:"):
        return (_expression(entry.removeprefix("re:")),)
    if entry.startswith(".*") or re.search(r"[\\^$+|(){}]", entry):
        return (_expression(rf"(?:{entry})(?:(?<=\.)|(?=\.)|$)"),)
    return tuple(_expression(fnmatch.translate(wild)) for wild in (entry, f"{entry}.*"))


@lru_cache(maxsize=1024)
def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SpecError(f"quantization_config: {pattern!r} is not a regular expression ({error})") from error
