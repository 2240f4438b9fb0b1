"""Patterns of module names in configurations: compiled once, told at a glance where they mean other modules.

A configuration may hold thousands of them, and every layer asks. Python's expressions have no limit of time, so that
those whose form lets the time explode are refused.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from functools import lru_cache

import attrs

from moe_core.quant.hf.weight import EXPERT, UnreadableNameError, Weight

#: What Python raises for an expression that it does not compile: a wrong one, one of too large numbers, or too deep.
_UNCOMPILED = (re.error, OverflowError, RecursionError)
#: How often a repeat or alternatives may follow others with no letter between them, where the first ends in every
#: place. Each time multiplies the time by the length of a name, so that three take seconds for all experts of a layer.
_MOST_TOUCHING = 2

_TOKEN = re.compile(
    r"(?P<escape>\\.)"
    r"|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])"
    r"|(?P<open>\((?:\?(?:P<\w+>|[:>=!]|<[=!]))?)"
    r"|(?P<close>\))"
    r"|(?P<repeat>(?:[*+?]|\{(?=[\d,])\d*,?\d*\})[?+]?)"
    r"|(?P<bar>\|)"
    r"|(?P<gap>[.^$])"
    r"|(?P<letter>.)",
    re.DOTALL,
)
_DIGITS = "0123456789"
#: Groups that do not simply hold what is between the brackets, such as `(?i)`.
_UNUSUAL = re.compile(r"\(\?(?!P<\w+>|[:>=!]|<[=!])")


@attrs.frozen
class Pattern:
    """One pattern.

    Attributes:
        compiled: As Python matches it.
        letters: Texts that every name it matches holds.
        written: Numbers by which it may tell experts apart.
    """

    compiled: re.Pattern[str]
    letters: tuple[str, ...]
    written: frozenset[int]

    def may_mean(self, weight: Weight) -> bool:
        """Whether the weight has a name with all of its letters; without them it has none that matches."""
        return all(may_hold(weight, text) for text in self.letters)


def may_hold(weight: Weight, text: str) -> bool:
    """Whether a text is part of a name of the weight, in whichever expert."""
    return any(each in weight.spelled for each in _any_expert(text, weight.experts.rpartition(".")[2]))


# Once for all layers of several models.
@lru_cache(maxsize=1 << 17)
def expression(text: str, tail: str = "") -> Pattern:
    """A regular expression, and an expression that has to follow it.

    Raises:
        UnreadableNameError: It is none, or of a form for which matching may take for ever.
    """
    try:
        compiled = re.compile(f"(?:{text}){tail}" if tail else text)
    except _UNCOMPILED as error:
        raise UnreadableNameError(f"{text!r} is not a regular expression ({error})") from error
    form = _Form()
    for token in _TOKEN.finditer(text):
        form.add(str(token.lastgroup), token[0])
    if form.fault:
        raise UnreadableNameError(
            f"matching {text!r} may take for ever, since {form.fault}; write a plainer expression"
        )
    letters = () if _UNUSUAL.search(text) else form.letters()
    return Pattern(compiled, letters, numbers_in(text))


@lru_cache(maxsize=1 << 17)
def wildcards(text: str) -> Pattern:
    """A name with shell wildcards, which has to match as a whole."""
    letters = _longest_first(re.split(r"[*?]+|\[.*", text))
    return Pattern(re.compile(fnmatch.translate(text)), letters, numbers_in(text))


def numbers_in(text: str) -> frozenset[int]:
    """Numbers in a pattern and those that begin with them, as `4[0-9]` means: by these it may tell experts apart."""
    found = {int(digits) for digits in re.findall(r"\d+", text) if len(digits) <= 4}
    return frozenset(found.union(*({number * 10 + last for last in range(10)} for number in found)))


@lru_cache(maxsize=1 << 17)
def _any_expert(text: str, module: str) -> tuple[str, ...]:
    """A text as it is, and with `EXPERT` for what may be the number of one; it may be cut off on both sides."""
    if not module:
        return (text,)
    before = f"{module}."
    inside = re.sub(rf"(?<=\b{re.escape(before)})\d+", EXPERT, text)
    found = [text, inside]
    for start in range(len(before)):
        rest = inside.removeprefix(before[start:])
        if rest != inside and rest[:1].isdecimal():
            found.append(f"{before[start:]}{EXPERT}{rest.lstrip(_DIGITS)}")
    return (*dict.fromkeys(found), inside.lstrip(_DIGITS))


def _longest_first(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({text for text in texts if text}, key=lambda text: (-len(text), text)))


@attrs.define
class _Group:
    """What a pair of brackets holds, and how many repeats and alternatives stood between it and the letter before."""

    since_letter: int = 0
    has_repeats: bool = False
    has_alternatives: bool = False


@attrs.define
class _Form:
    """An expression read token by token: what its matches hold, and whether the time to match may explode.

    Attributes:
        fault: Why it may, "" if it does not.
    """

    fault: str = ""
    _runs: list[str] = attrs.field(factory=lambda: [""])
    # Of the pattern and each group that is open, what it holds.
    _groups: list[_Group] = attrs.field(factory=lambda: [_Group()])
    _is_plain: bool = True
    # What a repeat would be about: a kind of token, or the group that was closed.
    _last: str = ""
    _closed: _Group = attrs.field(factory=_Group)
    # Repeats and alternatives since the last letter, and how often one followed another.
    _since_letter: int = 0
    _touching: int = 0

    def add(self, kind: str, token: str) -> None:
        """Read the next token."""
        if kind == "repeat":
            self._repeat(token)
            return
        if self._last == "letter":
            self._since_letter = 0
        if kind == "escape" and not token[1].isalnum():
            kind, token = "letter", token[1]
        self._last = kind
        if kind == "letter" and len(self._groups) == 1:
            self._runs[-1] += token
            return
        self._runs.append("")
        if kind == "escape":
            # What is written by its number may be any letter, and what an earlier group matched any text.
            self._is_plain &= token[1] in "dDsSwWbBAZ"
        elif kind == "bar":
            self._is_plain &= len(self._groups) > 1
            self._groups[-1].has_alternatives = True
        elif kind == "open":
            self._groups.append(_Group(self._since_letter))
        elif kind == "close":
            self._close()

    def letters(self) -> tuple[str, ...]:
        """Texts that every match holds, as far as that is plain to see."""
        return _longest_first(self._runs) if self._is_plain else ()

    def _close(self) -> None:
        closed = self._groups.pop()
        if not self._groups:
            # Closed by a bracket that its surroundings open.
            self._groups, self._is_plain = [_Group()], False
        self._groups[-1].has_repeats |= closed.has_repeats or closed.has_alternatives
        self._last, self._closed = "group", closed
        if closed.has_alternatives:
            self._touch(closed)

    def _repeat(self, token: str) -> None:
        of_group = self._closed if self._last == "group" else _Group()
        if token[0] != "?" and (of_group.has_repeats or of_group.has_alternatives):
            self.fault = "it repeats a group that itself holds a repeat or alternatives"
        may_be_none = token[0] in "*?" or re.match(r"\{0*[,}]", token) is not None
        if self._last == "letter" and len(self._groups) == 1 and may_be_none:
            self._runs[-1] = self._runs[-1][:-1]
        self._runs.append("")
        self._groups[-1].has_repeats, self._last = True, "repeat"
        self._touch(of_group)

    def _touch(self, group: _Group) -> None:
        """Count a repeat or alternatives; the letters of a group that may be left out end nothing before it."""
        self._since_letter = 1 + max(self._since_letter, group.since_letter)
        self._touching += self._since_letter > 1
        if self._touching > _MOST_TOUCHING:
            self.fault = f"more than {_MOST_TOUCHING} repeats or alternatives follow others at once"
