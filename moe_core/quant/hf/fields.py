"""Fields of a configuration: only those that are understood, or known to change no numbers.

Every reader takes its values from here, so that a value of another type than expected is the configuration's error and
never Python's. Null is as good as absent; what is merely empty or false is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from moe_core.quant.hf.weight import Weight

Value = TypeVar("Value")


def refuse_unknown(config: object, weight: Weight, used: Iterable[str], harmless: Iterable[str]) -> None:
    """Raise `SpecError` for a field that is neither read nor known to describe only; null is as good as absent."""
    if not isinstance(config, Mapping):
        raise weight.error(f"expected fields with values, got {config!r}")
    known = {*used, *harmless}
    unknown = [
        name for name, value in config.items() if name not in known and (value is not None or type(name) is not str)
    ]
    if unknown := sorted(unknown, key=str):
        raise weight.error(
            f"field {', '.join(map(repr, unknown))} is not understood and may change numbers; "
            f"read are {', '.join(sorted(used))}"
        )


def look_up(config: Mapping[str, Any], field: str, meanings: Mapping[Any, Value], weight: Weight) -> Value:
    """What a field's value means; raises `SpecError` with the known values. None stands for an absent field."""
    value = config.get(field)
    for known, meaning in meanings.items():
        # 1 is no True, and 0 no False.
        if type(known) is type(value) and known == value:
            return meaning
    listed = ", ".join("absent" if known is None else str(known) for known in meanings)
    raise weight.error(f"{field} {value!r} is not understood; known: {listed}")


def whole_number(config: Mapping[str, Any], field: str, weight: Weight) -> int:
    """An int field; raises `SpecError` for anything else."""
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise weight.error(f"expected {field} to be a whole number, got {value!r}")
    return value


def text(config: Mapping[str, Any], field: str, weight: Weight) -> str | None:
    """A text field, None if absent; raises `SpecError` for anything else."""
    value = config.get(field)
    if value is not None and not isinstance(value, str):
        raise weight.error(f"expected {field} to be text, got {value!r}")
    return value


def table(config: Mapping[str, Any], field: str, weight: Weight, content: str = "fields") -> Mapping[str, Any] | None:
    """A field that is a table by text, None if absent; raises `SpecError`, naming `content`, for anything else."""
    value = config.get(field)
    if value is None:
        return None
    if not isinstance(value, Mapping) or not _are_all(str, value):
        raise weight.error(f"expected {field} to be {content}, got {value!r}")
    return value


def tables(config: Mapping[str, Any], field: str, weight: Weight, content: str) -> Mapping[str, Mapping[str, Any]]:
    """A field that is a table of tables, empty if absent; raises `SpecError`, naming `content`, for anything else."""
    found = table(config, field, weight, content) or {}
    if not _are_all(Mapping, found.values()):
        raise weight.error(f"expected {field} to be {content}, got {dict(found)!r}")
    return found


def names_in(config: Mapping[str, Any], *fields: str, weight: Weight) -> tuple[str, ...]:
    """The names in all of these list fields; raises `SpecError` for a field that is no list of names."""
    names: list[str] = []
    for field in fields:
        value = config.get(field)
        if value is None:
            continue
        if not isinstance(value, (list, tuple)) or not _are_all(str, value) or "" in value:
            raise weight.error(f"expected {field} to be a list of names, got {value!r}")
        names += value
    return tuple(names)


def agreed(found: Mapping[str, Any], meant: Sequence[str], field: str, weight: Weight) -> Any:
    """What the entries of a table say that all mean a weight, None if none does; raises `SpecError` if they differ.

    Tools that take the first of several meant the order of their own; files are written with sorted keys.
    """
    others = [entry for entry in meant if found[entry] != found[meant[0]]]
    if others:
        raise weight.error(f"{field}: {meant[0]!r} and {others[0]!r} both mean it and differ")
    return found[meant[0]] if meant else None


def _are_all(kind: type, values: Iterable[object]) -> bool:
    """Whether all values are of a type; lists and tables may have ten thousands, and every weight asks."""
    return all(issubclass(found, kind) for found in set(map(type, values)))
