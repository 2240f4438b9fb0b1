"""Patterns of module names in configurations: compiled once, told at a glance where they mean other modules.

A configuration may hold thousands of them, and every layer asks. Python's expressions have no limit of time, so that
those whose form lets the time explode are refused.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import attrs

from moe_core.quant.hf.weight import EXPERT, UnreadableNameError, Weight

#: What Python raises for an expression that it does not compile: a wrong one, one of too large numbers, or too deep.
_UNCOMPILED = (re.error, OverflowError, RecursionError)
#: Most ways in which a name may be read, as far as an expression's form bounds them. One repeat after another with no
#: letter between them ends in every place of a name: three such take milliseconds for each name, four take seconds for
#: all experts of a layer.
_MOST_WAYS = 1 << 15
#: Places in a name.
_PLACES = 64

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
    """What a pair of brackets holds.

    Attributes:
        reach: At its beginning, how many repeats there are since the last letter.
        ways: At its beginning, in how many ways what stands before it may be read.
        is_look: Whether it only looks at what is around; it is read once for each way to get there.
        has_choices: Whether it holds a repeat or alternatives.
        branches: Each alternative before the last: its letters ("" if it is more than those), and reach and ways at
            its end.
        text: Letters of the last one, None if it is more than those.
    """

    reach: int = 0
    ways: int = 1
    is_look: bool = False
    has_choices: bool = False
    branches: list[tuple[str, int, int]] = attrs.field(factory=list)
    text: str | None = ""


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
    # Repeats since the last letter, and in how many ways what was read may be.
    _reach: int = 0
    _ways: int = 1

    def add(self, kind: str, token: str) -> None:
        """Read the next token."""
        if kind == "repeat":
            self._repeat(token)
            return
        if self._last == "letter":
            self._reach = 0
        if (kind == "escape" and not token[1].isalnum()) or (kind == "set" and len(token) == len("[.]")):
            kind, token = "letter", token[1]
        self._last, group = kind, self._groups[-1]
        if kind == "letter":
            group.text = None if group.text is None else group.text + token
        elif kind not in ("bar", "close"):
            group.text = None
        if kind == "letter" and len(self._groups) == 1:
            self._runs[-1] += token
            return
        self._runs.append("")
        if kind == "escape":
            # What is written by its number may be any letter, and what an earlier group matched any text.
            self._is_plain &= token[1] in "dDsSwWbBAZ"
        elif kind == "bar":
            self._is_plain &= len(self._groups) > 1
            self._end_branch()
        elif kind == "open":
            self._groups.append(_Group(self._reach, self._ways, is_look=token[2:3] in ("=", "!", "<")))
        elif kind == "close":
            self._close()

    def letters(self) -> tuple[str, ...]:
        """Texts that every match holds, as far as that is plain to see."""
        return _longest_first(self._runs) if self._is_plain else ()

    def _end_branch(self) -> None:
        group = self._groups[-1]
        group.branches.append((group.text or "", self._reach, self._ways))
        group.text, self._reach, self._ways = "", group.reach, group.ways

    def _close(self) -> None:
        if self._groups[-1].branches:
            self._end_branch()
        closed = self._groups.pop()
        if not self._groups:
            # Closed by a bracket that its surroundings open.
            self._groups, self._is_plain = [_Group()], False
        if closed.is_look:
            self._reach, self._ways = closed.reach, closed.ways
        elif closed.branches:
            texts, reaches, ways = zip(*closed.branches, strict=True)
            closed.has_choices = True
            self._reach = max(reaches)
            self._count(max(ways) * _most_at_once(texts))
        self._groups[-1].has_choices |= closed.has_choices
        self._groups[-1].text, self._last, self._closed = None, "group", closed

    def _repeat(self, token: str) -> None:
        of_group = self._closed if self._last == "group" else _Group()
        if token[0] != "?" and of_group.has_choices:
            self.fault = "it repeats a group that itself holds a repeat or alternatives"
        may_be_none = token[0] in "*?" or re.match(r"\{0*[,}]", token) is not None
        if self._last == "letter" and len(self._groups) == 1 and may_be_none:
            self._runs[-1] = self._runs[-1][:-1]
        self._runs.append("")
        self._groups[-1].has_choices, self._groups[-1].text, self._last = True, None, "repeat"
        # The letters of a group that may be left out end nothing before it.
        self._reach = max(self._reach, of_group.reach)
        if token[0] == "?":
            self._count(2 * self._ways)
        else:
            self._count(self._ways * (_PLACES if self._reach else 1))
            self._reach += 1

    def _count(self, ways: int) -> None:
        self._ways = ways
        if ways > _MOST_WAYS:
            self.fault = "too many of its repeats and alternatives follow each other with no letter between them"


def _most_at_once(texts: Iterable[str]) -> int:
    """How many alternatives may match in one place: those that are the beginning of the same one."""
    numbers = Counter(texts)
    return max(sum(numbers[text[:end]] for end in range(len(text) + 1)) for text in numbers)
