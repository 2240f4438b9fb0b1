from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_core.errors import SpecError
from moe_core.json_files import JsonValue, read_json, shown


def test_a_mark_of_the_byte_order_is_no_content(tmp_path: Path) -> None:
    file = tmp_path / "made_on_windows.json"
    file.write_text('{"a": "ü"}', encoding="utf-8-sig")
    assert read_json(file) == {"a": "ü"}


def test_values_of_the_right_kind() -> None:
    value = JsonValue({"a b": [1, 2.5, "x", None]})
    whole, half, text, null = value["a b"].elements()
    assert (whole.whole(1), half.above_zero(), text.name(), null.optional(JsonValue.text)) == (1, 2.5, "x", None)
    assert half.place == '["a b"][1]'


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("content", "read", "message"),
    [
        (None, JsonValue.fields, "a.b: expected an object, got null"),
        ({"\x1b": 1}, JsonValue.fields, r'a.b: expected printable keys, got "\\u001b"'),
        ({}, JsonValue.elements, "a.b: expected a list, got an object"),
        (True, JsonValue.text, "a.b: expected a text, got true"),
        ("a\x1b[31m", JsonValue.name, r'a.b: expected a printable text, got "a\\u001b\[31m"'),
        (True, lambda value: value.whole(1), "a.b: expected a whole number >= 1 .64 bits., got true"),
        (1.0, lambda value: value.whole(1), "a.b: expected a whole number >= 1 .64 bits., got 1.0"),
        (0, lambda value: value.whole(1), "a.b: expected a whole number >= 1 .64 bits., got 0"),
        ("1", JsonValue.above_zero, 'a.b: expected a number > 0, got "1"'),
        (float("nan"), JsonValue.above_zero, "a.b: expected a number > 0, got NaN"),
        (10**400, JsonValue.above_zero, "a.b: expected a number > 0, got 1000.*[.][.][.]"),
        ({}, lambda value: value["c"], "a.b: field 'c' is missing"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(content: Any, read: Callable[[JsonValue], Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}$"):
        read(JsonValue({"b": content}, "a")["b"])


def test_values_in_the_words_of_json() -> None:
    said = [shown(value) for value in (None, True, float("inf"), "x", [1], {}, object)]
    assert said[:6] == ["null", "true", "Infinity", '"x"', "a list", "an object"]
    assert len(shown("x" * 1000)) < 100
    assert json.loads(shown("\n")) == "\n"
