"""One weight of an experts module, and the names by which configurations call it.

Configurations name the experts module, a projection of it (fused or not), or a projection of every single expert; with
or without the prefix that a larger model puts before its text part.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

import attrs

from moe_core.errors import SpecError
from moe_core.expert_names import FUSED, HALVES, PROJECTIONS, halves_of
from moe_core.quant.scheme import QuantScheme
from moe_core.quant.stored import StoredScheme
from moe_core.vocabulary import FLOAT_DTYPES, one_of

#: What may stand before the text part's names, longest first; names are compared without it.
CONTAINERS = ("model.language_model.", "language_model.model.", "language_model.", "thinker.model.", "model.", "")

#: Stands in `Weight.spelled` for the number of an expert; no name holds it.
EXPERT = "#"

#: Most experts that an error lists.
_SHOWN = 4
#: Digits of a number that counts anything.
_MOST_DIGITS = 9


class UnreadableNameError(SpecError):
    """A name or pattern that means nothing; whoever asks about a weight says about which."""


@attrs.frozen
class Weight:
    """What a configuration is asked about.

    Attributes:
        experts: Dotted name of the experts module; if empty, only rules for the whole model apply.
        half: One of `HALVES`.
        dtype: Layer dtype, which unquantized weights have.
        num_experts: How many experts the layer has, None if that is not known.
    """

    experts: str
    half: str
    dtype: str = attrs.field(validator=one_of(*FLOAT_DTYPES))
    num_experts: int | None = None

    def __str__(self) -> str:
        """`model.layers.3.mlp.experts (down)`."""
        return f"{self.experts or 'the model'} ({self.half})"

    def error(self, problem: str) -> SpecError:
        """The error for what a configuration says about this weight."""
        return SpecError(f"quantization_config of {self}: {problem}")

    def scheme(self, **fields: Any) -> QuantScheme:
        """The scheme with these fields; a contradiction between them is this weight's error."""
        try:
            return QuantScheme(**fields)
        except SpecError as error:
            raise self.error(str(error)) from error

    def unquantized(self) -> StoredScheme:
        """What the weight is where the configuration leaves it alone."""
        return StoredScheme(QuantScheme.from_name(self.dtype))

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the weight that means all experts: as given, and as text parts are prefixed."""
        return _names(self.experts, self.half, None)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the experts module."""
        return tuple(_modules(self.experts))

    def names_in(self, expert: int) -> tuple[str, ...]:
        """Every name of the weight in one expert."""
        return _names(self.experts, self.half, expert)

    @property
    def spelled(self) -> str:
        """All of these names in a text, those in one expert with `EXPERT` for its number."""
        return _spelled(self.experts, self.half)

    def entry(self, table: Mapping[str, Any], suffix: str = "") -> Any:
        """What a table from module names says about this weight, None if nothing.

        Raises:
            SpecError: It does not say the same for all experts, or under all names, or leaves experts out.
        """
        found = {f"{name}{suffix}": table[f"{name}{suffix}"] for name in self.names if f"{name}{suffix}" in table}
        singles = self._experts_in(table, suffix)
        found |= {name: table[name] for name in singles}
        if not found:
            return None
        experts = set(singles.values())
        every = range(self.num_experts or max(experts, default=0) + 1)
        # A number may be of any size, and the first that are left out say as much as all.
        others = itertools.islice((expert for expert in every if expert not in experts), _SHOWN + 1)
        self.require_alike(experts, set(others))
        first, value = next(iter(found.items()))
        for name, other in found.items():
            if other != value:
                raise self.error(f"experts or names disagree: {first} is {value!r}, {name} is {other!r}")
        return value

    def require_alike(self, named: AbstractSet[int], others: AbstractSet[int]) -> None:
        """Raise `SpecError` where a configuration names some experts of the layer and others not."""
        if named and others:
            problem = f"names expert {_some(named)} and not expert {_some(others)}; the experts of a layer must agree"
            raise self.error(problem if self.num_experts else f"{problem}, and how many there are is not known here")

    def _experts_in(self, table: Mapping[str, Any], suffix: str) -> dict[str, int]:
        """The names in a table that are about this weight in one expert, or about a whole expert, and its number."""
        inside, name_of = f"{without_container(self.experts)}.", _single(self.experts, self.half, suffix)
        # Most of some hundred thousand names are other modules'.
        found = ((name, name_of.fullmatch(name)) for name in table if inside in name)
        return {name: number_of(single[1]) for name, single in found if single} if self.experts else {}


def experts_and_halves(module: str) -> tuple[str, tuple[str, ...]]:
    """The experts module that a name belongs to, and the halves it means: all of them for the module itself."""
    head, _, leaf = module.rpartition(".")
    meant = halves_of(leaf)
    if not meant:
        return module, HALVES
    above, _, index = head.rpartition(".")
    return (above if index.isdecimal() else head), meant


def number_of(digits: str) -> int:
    """The number that a name has of a layer or an expert; Python itself gives up at some thousand digits.

    Raises:
        UnreadableNameError: It is too large to be one.
    """
    if len(digits) > _MOST_DIGITS:
        raise UnreadableNameError(f"a name has the number {digits[:_MOST_DIGITS]}..., which counts nothing")
    return int(digits)


def without_container(name: str) -> str:
    """The name without what stands before the text part's names."""
    return name.removeprefix(next(container for container in CONTAINERS if name.startswith(container)))


def _modules(experts: str) -> Iterable[str]:
    bare = without_container(experts)
    return dict.fromkeys([experts, *(container + bare for container in CONTAINERS if bare)])


def _leaves(half: str) -> tuple[str, ...]:
    return (*PROJECTIONS[half], *(FUSED if half != "down" else ()))


def _some(experts: AbstractSet[int]) -> str:
    first = [str(expert) for expert in sorted(experts)]
    return ", ".join([*first[:_SHOWN], *(["..."] if len(first) > _SHOWN else [])])


@lru_cache(maxsize=1024)
def _spelled(experts: str, half: str) -> str:
    return "\n".join((*_names(experts, half, None), *_names(experts, half, EXPERT)))


@lru_cache(maxsize=4096)
def _names(experts: str, half: str, expert: int | str | None) -> tuple[str, ...]:
    modules = [f"{module}." if module else "" for module in _modules(experts)]
    if expert is not None:
        return tuple(f"{module}{expert}.{leaf}" for module in modules for leaf in _leaves(half))
    inside = [f"{module}{leaf}" for module in modules for leaf in _leaves(half)]
    return (*inside, *filter(None, _modules(experts)))


@lru_cache(maxsize=64)
def _single(experts: str, half: str, suffix: str) -> re.Pattern[str]:
    modules, leaves = "|".join(map(re.escape, _modules(experts))), "|".join(_leaves(half))
    return re.compile(rf"(?:{modules})\.(\d+)(?:\.(?:{leaves}))?{re.escape(suffix)}")
