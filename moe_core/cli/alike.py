"""Texts that differ in their numbers alone: what they share, and one text for all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: A number, or a list of them; digits of names such as `int8` and `sm90` are none.
_NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w|\.\d)"
_NUMBERS = re.compile(rf"{_NUMBER}(?:, {_NUMBER})*(?: and \d+ more)?")


def without_numbers(text: str) -> str:
    """The text with a mark in place of each number, and of each list of numbers."""
    return _NUMBERS.sub("#", text)


def in_one(texts: Sequence[str]) -> str:
    """One text for several that are equal `without_numbers`, with the range of each number that is not the same.

    Of lists that differ the first stands for all: `relative error 0.31 to 0.52 in tokens 0, 2 (or others)`.
    """
    first = texts[0]
    ranges = iter([_range(found) for found in zip(*map(_NUMBERS.findall, dict.fromkeys(texts)), strict=True)])
    return _NUMBERS.sub(lambda match: next(ranges), first)


def _range(found: Sequence[str]) -> str:
    if len(set(found)) == 1:
        return found[0]
    if all(_is_one(number) for number in found):
        return f"{min(found, key=float)} to {max(found, key=float)}"
    return f"{found[0]} (or others)"


def _is_one(number: str) -> bool:
    return re.fullmatch(_NUMBER, number) is not None
