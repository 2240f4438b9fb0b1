"""One weight of an experts module, and the names by which configurations call it.

Configurations name the experts module, a projection of it (fused or not), or a projection of every single expert; with
or without the prefix that a larger model puts before its text part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import attrs

from moe_core.errors import SpecError
from moe_core.expert_names import FUSED, HALVES, PROJECTIONS
from moe_core.expert_names import halves_of as halves_of_projection
from moe_core.quant.scheme import QuantScheme
from moe_core.quant.stored import StoredScheme
from moe_core.vocabulary import FLOAT_DTYPES, one_of

#: What may stand before the text part's names, longest first; names are compared without it.
CONTAINERS = ("model.language_model.", "language_model.model.", "language_model.", "thinker.model.", "model.", "")


@attrs.frozen
class Weight:
    """What a configuration is asked about.

    Attributes:
        experts: Dotted name of the experts module; if empty, only rules for the whole model apply.
        half: One of `HALVES`.
        dtype: Layer dtype, which unquantized weights have.
    """

    experts: str
    half: str
    dtype: str = attrs.field(validator=one_of(*FLOAT_DTYPES))

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
        """Every name of the weight, in the first expert or without one: as given, and as text parts are prefixed."""
        return _names(self.experts, self.half)

    def entry(self, table: Mapping[str, Any], suffix: str = "") -> Any:
        """What a table from module names says about this weight, None if nothing.

        Raises:
            SpecError: It does not say the same for all experts, or under all names.
        """
        found = {f"{name}{suffix}": table[f"{name}{suffix}"] for name in self.names if f"{name}{suffix}" in table}
        for module in _modules(self.experts):
            for leaf in PROJECTIONS[self.half]:
                expert = 1
                while (name := f"{module}.{expert}.{leaf}{suffix}") in table:
                    found[name] = table[name]
                    expert += 1
        if not found:
            return None
        first, value = next(iter(found.items()))
        for name, other in found.items():
            if other != value:
                raise self.error(f"experts or names disagree: {first} is {value!r}, {name} is {other!r}")
        return value


def halves_of(module: str) -> tuple[str, tuple[str, ...]]:
    """The experts module that a name belongs to, and the halves it means: all of them for the module itself."""
    head, _, leaf = module.rpartition(".")
    meant = halves_of_projection(leaf)
    if not meant:
        return module, HALVES
    above, _, index = head.rpartition(".")
    return (above if index.isdecimal() else head), meant


def without_container(name: str) -> str:
    """The name without what stands before the text part's names."""
    return name.removeprefix(next(container for container in CONTAINERS if name.startswith(container)))


def _modules(experts: str) -> Iterable[str]:
    bare = without_container(experts)
    return dict.fromkeys([experts, *(container + bare for container in CONTAINERS if bare)])


@lru_cache(maxsize=1024)
def _names(experts: str, half: str) -> tuple[str, ...]:
    leaves = [*PROJECTIONS[half], *(FUSED if half != "down" else ())]
    inside = [*(f"0.{leaf}" for leaf in PROJECTIONS[half]), *leaves]
    modules = _modules(experts)
    return tuple([*(f"{module}.{leaf}".lstrip(".") for module in modules for leaf in inside), *filter(None, modules)])
