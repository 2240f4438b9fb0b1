"""What environment variables of a vendor's library must be for a kernel: declared as data, like limits of sizes.

The resolver compares them with `Environment.variables`, so that a contradiction is a reason and not a hang in the first
forward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import attrs

from moe_core.errors import SpecError
from moe_core.vocabulary import LIMIT_FIELDS, as_tuple, at_least, instance_of, is_line, require_word

#: What is needed, and what was found instead.
Fault: TypeAlias = tuple[str, str]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_variable(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """An attrs validator: a tuple of names of environment variables."""
    names = value if isinstance(value, tuple) else (value,)
    if not isinstance(value, tuple) or not all(isinstance(name, str) and _VARIABLE.fullmatch(name) for name in names):
        where = f"{type(instance).__name__}, field {attribute.name!r}"
        raise SpecError(f"{where}: expected a tuple of names of environment variables, got {value!r}")


def _pairs(value: Any) -> Any:
    """An attrs converter: pairs whose second halves are tuples; what is none stays as it is, for the validator."""
    pairs = as_tuple(value.items() if isinstance(value, Mapping) else value)
    try:
        return tuple((first, as_tuple(second)) for first, second in pairs)
    except (TypeError, ValueError):
        return value


@attrs.frozen(kw_only=True)
class Setting:
    """Variables and the values that a kernel works with, or does not.

    Attributes:
        values: Variable -> its values, "" for one that is not set or empty; they are compared without case.
        holds: Whether each variable must have one of its values; False: not all of them at the same time.
        hint: What to do.
    """

    values: tuple[tuple[str, tuple[str, ...]], ...] = attrs.field(converter=_pairs)
    holds: bool = attrs.field(default=True, validator=instance_of(bool))
    hint: str = attrs.field(default="", validator=is_line)

    @values.validator
    def _check_values(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        match value:
            case ((_, _), *_):
                is_variable(self, attribute, self.variables)
            case _:
                raise SpecError(f"Setting, field 'values': expected a variable and its values, got {value!r}")
        for name, values in value:
            if not isinstance(values, tuple) or not values or not all(isinstance(text, str) for text in values):
                raise SpecError(f"Setting, field 'values', {name}: expected a tuple of texts, got {values!r}")

    @property
    def variables(self) -> tuple[str, ...]:
        """The names that it speaks about."""
        return tuple(name for name, _ in self.values)

    def fault(self, variables: Mapping[str, str]) -> Fault | None:
        """What is wrong with a process whose environment has these variables, None if nothing is."""
        found = {name: variables.get(name, "") for name in self.variables}
        fits = all(found[name].lower() in {text.lower() for text in values} for name, values in self.values)
        return None if fits == self.holds else (str(self), " and ".join(map(_assigned, found, found.values())))

    def __str__(self) -> str:
        """`DEEP_MODE unset or default`, `not (A=1 and B=0)`."""
        named = " and ".join(
            " or ".join([_assigned(name, values[0]), *(text or "unset" for text in values[1:])])
            for name, values in self.values
        )
        return named if self.holds else f"not ({named})"


def _assigned(name: str, value: str) -> str:
    return f"{name}={value}" if value else f"{name} unset"


@attrs.frozen(kw_only=True)
class BufferSize:
    """A variable that says how much memory a library takes, before it has seen a layer, and what a layer needs of it.

    Attributes:
        variables: Its names; the first that is set counts.
        default: What the library takes where none is set, in units.
        unit: Bytes of one.
        bytes_needed: (factor, sizes) pairs, each size one of `LIMIT_FIELDS`: bytes are the sum of their products;
            a constant has no sizes. A workload without `max_tokens` counts as the largest that the spec's limits allow.
        hint: What to do; the reason adds whether to declare `max_tokens`, or to send fewer.
    """

    variables: tuple[str, ...] = attrs.field(converter=as_tuple, validator=is_variable)
    default: int = attrs.field(validator=at_least(0))
    unit: int = attrs.field(validator=at_least(1))
    bytes_needed: tuple[tuple[int, tuple[str, ...]], ...] = attrs.field(converter=_pairs)
    hint: str = attrs.field(default="", validator=is_line)

    @bytes_needed.validator
    def _check_terms(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        for term in value if isinstance(value, tuple) else (value,):
            match term:
                case (int(), tuple(names)) if isinstance(term, tuple):
                    for name in names:
                        require_word(name, LIMIT_FIELDS, "BufferSize, field 'bytes_needed'")
                case _:
                    expected = "expected pairs of a factor and a tuple of sizes"
                    raise SpecError(f"BufferSize, field 'bytes_needed': {expected}, got {term!r}")

    def needed(self, sizes: Mapping[str, int | None]) -> int | None:
        """Units that a layer of these sizes needs, None where a size is not known."""
        total = 0
        for factor, names in self.bytes_needed:
            for name in names:
                size = sizes.get(name)
                if size is None:
                    return None
                factor *= size
            total += factor
        return -(-total // self.unit)

    @property
    def follows_tokens(self) -> bool:
        """Whether fewer tokens at a time need less."""
        return any({"max_tokens", "max_rows"} & {*names} for _, names in self.bytes_needed)

    def fault(self, variables: Mapping[str, str], sizes: Mapping[str, int | None]) -> Fault | None:
        """What is wrong with a process whose environment has these variables, None if nothing is or nobody knows."""
        needed = self.needed(sizes)
        name = next((name for name in self.variables if variables.get(name)), "")
        value = variables.get(name, str(self.default))
        if needed is None or (value.isdecimal() and int(value) >= needed):
            return None
        found = f"{name}={value}" if name else f"unset, which means {self.default}"
        return f"{' or '.join(self.variables)} >= {needed}", found
