"""The exception tree: every error of the project derives from `MoeCoreError`.

An error says what failed, where it came from, what was expected and what to do. Errors about values also
derive from `ValueError`, errors about the state of the machine or of a plugin from `RuntimeError`, so that
code which does not know this project still catches them in the usual way.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from moe_core.problem_list import folded

if TYPE_CHECKING:
    from moe_core.decision import Decision


class MoeCoreError(Exception):
    """Base of every error raised by moe-core."""


def first_line(error: BaseException) -> str:
    """What a table has room for of an error that others raise."""
    lines = (out_of_memory(error) or str(error)).strip().splitlines()
    return lines[0] if lines else "no message"


def in_a_line(error: BaseException) -> str:
    """`Class: first line` of a foreign error; the first line alone of one that says what it is."""
    says_it = isinstance(error, MoeCoreError) or out_of_memory(error)
    return first_line(error) if says_it else f"{type(error).__name__}: {first_line(error)}"


#: How torch's allocators say what was wanted, and what there was.
_WANTED = re.compile(r"tried to allocate (?:more than )?(\d+(?:\.\d+)?) ?([A-Za-z]+)", re.IGNORECASE)
_FREE = re.compile(r"(\d+(?:\.\d+)? [KMGT]?i?B)(?: is)? free")
#: How drivers, their libraries and systems say it, of whom torch and Triton repeat the text.
_NO_MEMORY = re.compile(r"\bout of memory\b|_STATUS_ALLOC_FAILED|cannot allocate memory", re.IGNORECASE)


def out_of_memory(error: BaseException) -> str:
    """`out of memory: 20.00 GiB were asked for, 3.14 GiB are free`, "" for any other error.

    torch's own text is a paragraph of its allocator's statistics and variables.
    """
    if isinstance(error, MoeCoreError) or not isinstance(error, (RuntimeError, MemoryError)):
        return ""
    try:
        text = str(error)
    except Exception:
        return ""
    wanted, free = _WANTED.search(text), _FREE.search(text)
    # Only some of torch's allocators raise the class; all say how much they tried. Below a first line is advice.
    says_it = wanted or _NO_MEMORY.search(text.partition("\n")[0])
    if not says_it and type(error).__name__ not in ("OutOfMemoryError", "MemoryError"):
        return ""
    said = [f"{_size(*wanted.groups())} were asked for"] if wanted else []
    said += [f"{free[1]} are free"] if free else []
    return ": ".join(filter(None, ("out of memory", ", ".join(said))))


def _size(number: str, unit: str) -> str:
    return f"{float(number) / (1 << 30):.2f} GiB" if unit == "bytes" else f"{number} {unit}"


def harmless(text: str, most: int = 0) -> str:
    """A text of several lines without control characters, which Python's escapes stand for; shortened to `most`."""
    text = f"{text[:most]}..." if 0 < most < len(text) else text
    letters = (letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
    return text if text.isprintable() else "".join(letters)


def is_interrupt(error: BaseException) -> bool:
    """Whether it is, or is a group that holds, the user's Ctrl-C, which must end the program whatever code it meets.

    Everything else that foreign code raises is a failure of that code: `SystemExit` and other exceptions beside
    `Exception`, such as the panic of a library in Rust, too.
    """
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    return isinstance(error, KeyboardInterrupt)


#: Letters of a foreign error that are told; a traceback has all.
_MOST_TOLD = 1000


def in_words(error: BaseException) -> str:
    """`Class: text` of a foreign error without control characters, also where its text cannot be read or is none.

    Of memory that ran out, what `out_of_memory` says.
    """
    if short := out_of_memory(error):
        return short
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be read"
    return ": ".join(filter(None, (type(error).__name__, harmless(text.strip(), _MOST_TOLD))))


def some_of(names: Iterable[object], most: int = 12) -> str:
    """`a, b, c`, of more than `most` the first and their number: a model has tens of thousands of names."""
    listed = [str(name) for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 shape`, `2 shapes`; `plural` where an s does not make it."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


#: What people write -> what they mean by it, though other words look more like it: torch's and others' names.
_MEANT = {"gpu": "cuda", "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`; did you mean 'sm90'?` where one of `words` is close, else ""."""
    # Capitals, and spaces around a word, are slips as well.
    known, written = {other.lower(): other for other in words}, word.strip().lower()
    if written in _MEANT:
        close = [known[other] for other in known if other == _MEANT[written]]
    else:
        # Who stops in mid-name means one that begins so, however long it is.
        begun = [other for other in known if written and other.startswith(written)]
        close = [known[other] for other in begun or difflib.get_close_matches(written, known, n=1)]
    return f"; did you mean {close[0]!r}?" if close else ""


class SpecError(MoeCoreError, ValueError):
    """A value object (spec, scheme, request, environment) holds a value outside its vocabulary.

    Attributes:
        sizes: Names of the fields with sizes that are refused, or of several that contradict each other.
    """

    def __init__(self, message: str, sizes: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.sizes = tuple(sizes)


#: The core names no backend that it does not bring, and so cannot tell which package would have to be installed.
_INSTALL = (
    "Backends come with plugins, which are packages of their own: one that is not listed by moe-core list-backends has "
    "to be installed first."
)


class UnknownNameError(MoeCoreError, ValueError):
    """A name (backend, preset, scheme, workload phase) is not known; the message lists what is.

    Attributes:
        kind: What it should name.
        name: What was given.
        known: What the message lists.
        spellings: Every way to write those, too many to list; what was meant is looked for among them too.
    """

    def __init__(
        self, kind: str, name: str, known: Iterable[str], hint: str = "", spellings: Iterable[str] = ()
    ) -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(set(known)))
        self.spellings = tuple(sorted(set(spellings)))
        meant = did_you_mean(name, (*self.known, *self.spellings)) or "."
        listed = ", ".join(map(self._listed, self.known)) or "none"
        super().__init__(f"unknown {kind} {name!r}{meant} Known: {listed}.{' ' + hint if hint else ''}")
        self._hint = hint

    def _listed(self, name: str) -> str:
        """A known name as the message has it."""
        return name

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes hand errors to their parent by pickling."""
        return type(self), (self.kind, self.name, self.known, self._hint, self.spellings)


class UnknownBackendError(UnknownNameError):
    """A name that no installed plugin has; it may be one of a plugin that is not installed.

    Attributes:
        plugins: Each known name -> the plugins that have it; none where it is the name of a plugin.
    """

    def __init__(
        self, kind: str, name: str, plugins: Mapping[str, Iterable[str]], hint: str = "", spellings: Iterable[str] = ()
    ) -> None:
        self.plugins = {known: tuple(sorted(set(of))) for known, of in plugins.items()}
        super().__init__(kind, name, self.plugins, " ".join(filter(None, (hint, _INSTALL))), spellings)
        self._own_hint = hint

    def _listed(self, name: str) -> str:
        of = self.plugins[name]
        return f"{name} (plugin{'s' if len(of) > 1 else ''} {', '.join(of)})" if of else name

    def __reduce__(self) -> tuple[Any, ...]:
        """As of its base."""
        return type(self), (self.kind, self.name, self.plugins, self._own_hint, self.spellings)


class PluginError(MoeCoreError, RuntimeError):
    """A plugin could not be loaded, declared something invalid, or answered a hook wrongly."""


class PluginConflictError(PluginError, ValueError):
    """Two plugins claim one name; neither silently wins."""


class ResolutionError(MoeCoreError, ValueError):
    """No combination fits the request, or a pinned one does not; `decision` holds every reason."""

    def __init__(self, message: str, decision: Decision | None = None) -> None:
        self.decision = decision
        super().__init__(message)


#: Most lines of problems that a message has: a model has tens of thousands of tensors.
_MOST_LISTED = 50


class WeightsError(MoeCoreError, ValueError):
    """Checkpoint tensors are missing, unknown, misshapen or of a foreign layout; lists the first of them.

    Attributes:
        problems: All of them, if there is a list.
    """

    problems: tuple[str, ...] = ()

    @classmethod
    def listing(cls, title: str, problems: Iterable[str]) -> WeightsError:
        """The error whose message is `title` and a line per problem, of very many the first ones and their number.

        Problems that differ in the expert alone share a line.
        """
        every = tuple(problems)
        lines = folded(every)
        left = sum(line.num_problems for line in lines[_MOST_LISTED:])
        more = [f"and {left} more"] if left else []
        error = cls("\n  ".join([title, *(line.text for line in lines[:_MOST_LISTED]), *more]))
        error.problems = every
        return error


class InputError(MoeCoreError, ValueError):
    """A tensor given to a forward call has the wrong shape, dtype, device or content."""


class PlanMismatchError(MoeCoreError, RuntimeError):
    """The ranks of one group resolved different plans, or one of them did not answer in time."""


class UnwrittenError(MoeCoreError, OSError):
    """A file cannot be written; what was there is unchanged."""


class UnsupportedModelError(MoeCoreError, NotImplementedError):
    """A model's experts module has a trait that the bridge does not understand; it never guesses."""
