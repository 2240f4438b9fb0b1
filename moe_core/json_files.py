"""JSON that people write by hand: what says two things is refused, and what is wrong is said in JSON's words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import attrs

from moe_core.errors import SpecError
from moe_core.regular_file import read_regular

#: UTF-8, with or without the mark in front that editors on Windows write.
ENCODING = "utf-8-sig"
#: Letters that a message has room for.
_MOST_SHOWN = 60
_T = TypeVar("_T")

_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


@attrs.frozen
class JsonValue:
    """A value of a document, which knows where it is.

    What reads it raises `SpecError` with the place, what was expected, and what is there.

    Attributes:
        content: What `parse_json` gave.
        place: `machine.versions`, `rows[0].timing`, `times["E8 K2"]`; "" for the document itself.
    """

    content: Any
    place: str = ""

    def refuse(self, expected: str) -> NoReturn:
        """Say that something else was expected here."""
        raise SpecError(f"{self.place or 'the document'}: expected {expected}, got {shown(self.content)}")

    def __getitem__(self, name: str) -> JsonValue:
        """The value of a key, which must be there."""
        found = self.fields()
        if name not in found:
            raise SpecError(f"{self.place}{self.place and ': '}field {name!r} is missing")
        return found[name]

    def fields(self) -> dict[str, JsonValue]:
        """The values of an object by their keys, which a terminal can show."""
        if not isinstance(self.content, Mapping):
            self.refuse("an object")
        for name in self.content:
            if not name.isprintable():
                raise SpecError(f"{self.place or 'the document'}: expected printable keys, got {shown(name)}")
        return {name: JsonValue(value, self._place_of(name)) for name, value in self.content.items()}

    def _place_of(self, name: str) -> str:
        if not name.isidentifier():
            return f"{self.place}[{json.dumps(name, ensure_ascii=False)}]"
        return f"{self.place}{self.place and '.'}{name}"

    def elements(self) -> list[JsonValue]:
        """The values of a list."""
        if not isinstance(self.content, list):
            self.refuse("a list")
        return [JsonValue(value, f"{self.place}[{index}]") for index, value in enumerate(self.content)]

    def text(self) -> str:
        """Any text."""
        if not isinstance(self.content, str):
            self.refuse("a text")
        return self.content

    def name(self) -> str:
        """A text of one line that a terminal can show."""
        text = self.text()
        return text if text.isprintable() else self.refuse("a printable text")

    def whole(self, least: int) -> int:
        """A whole number of at least `least` that 64 bits hold."""
        if type(self.content) is not int or not least <= self.content < 1 << 63:
            self.refuse(f"a whole number >= {least} (64 bits)")
        return self.content

    def above_zero(self) -> float:
        """A finite number above 0."""
        return float(self.content) if 0 < self._number() < math.inf else self.refuse("a number > 0")

    def not_below_zero(self) -> float:
        """A finite number that is not below 0."""
        return float(self.content) if 0 <= self._number() < math.inf else self.refuse("a number >= 0")

    def _number(self) -> float:
        """What can be compared, NaN for what is no number or none that a float holds."""
        if type(self.content) not in (int, float):
            return math.nan
        try:
            return float(self.content)
        except OverflowError:
            return math.nan

    def optional(self, read: Callable[[JsonValue], _T]) -> _T | None:
        """What `read` makes of the value, None of null."""
        return None if self.content is None else read(self)


def read_json(path: Path) -> Any:
    """What a file of JSON holds; raises as `parse_json`, and `OSError`."""
    return parse_json(read_regular(path, ENCODING))


def parse_json(text: str) -> Any:
    """What a JSON document holds.

    Raises:
        ValueError: It is none, is nested too deeply, or names a key of one object twice, of which Python's own reader
            would silently take the second.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise SpecError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise SpecError(f"an object names the key {name!r} twice")
        found[name] = value
    return found


def kind_of(value: object) -> str:
    """What a value is called in JSON: `an object`, `a list`, `a text`, `a number`, `a boolean`, `null`."""
    return _KINDS.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)


def shown(value: object) -> str:
    """A value as JSON writes it, shortened; of lists and objects what they are."""
    if not isinstance(value, str | int | float | None):
        return kind_of(value)
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
