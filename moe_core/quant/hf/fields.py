"""Fields of a configuration: only those that are understood, or known to change no numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from moe_core.quant.hf.weight import Weight

Value = TypeVar("Value")


def refuse_unknown(config: object, weight: Weight, used: Iterable[str], harmless: Iterable[str]) -> None:
    """Raise `SpecError` for a field that is neither read nor known to describe only; null is as good as absent."""
    if not isinstance(config, Mapping):
        raise weight.error(f"expected fields with values, got {config!r}")
    known = {*used, *harmless}
    unknown = sorted(name for name, value in config.items() if name not in known and value is not None)
    if unknown:
        raise weight.error(
            f"field {', '.join(map(repr, unknown))} is not understood and may change numbers; "
            f"read are {', '.join(sorted(used))}"
        )


def look_up(config: Mapping[str, Any], field: str, meanings: Mapping[Any, Value], weight: Weight) -> Value:
    """What a field's value means; raises `SpecError` with the known values. None stands for an absent field."""
    value = config.get(field)
    try:
        return meanings[value]
    except (KeyError, TypeError):
        known = ", ".join("absent" if known is None else str(known) for known in meanings)
        raise weight.error(f"{field} {value!r} is not understood; known: {known}") from None


def whole_number(config: Mapping[str, Any], field: str, weight: Weight) -> int:
    """An int field; raises `SpecError` for anything else."""
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise weight.error(f"expected {field} to be a whole number, got {value!r}")
    return value


def names_in(config: Mapping[str, Any], *fields: str, weight: Weight) -> tuple[str, ...]:
    """The names in all of these list fields; raises `SpecError` for a field that is no list of names."""
    names: list[str] = []
    for field in fields:
        value = config.get(field) or []
        if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
            raise weight.error(f"expected {field} to be a list of names, got {value!r}")
        names += value
    return tuple(names)
