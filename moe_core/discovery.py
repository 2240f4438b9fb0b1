"""Find and load plugins: two functions, three types. Finding imports nothing; loading imports one module."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar

import attrs

from moe_core.errors import PluginError, UnknownNameError, harmless, in_words, is_interrupt
from moe_core.hookspecs import ENTRY_POINT_GROUP

#: Letters of what metadata says that are kept.
_MOST_SAID = 200


def _said(text: str) -> str:
    """An attrs converter: whoever packs a distribution may write anything into its metadata."""
    return harmless(text, _MOST_SAID)


@attrs.frozen(kw_only=True)
class Found:
    """An entry point, known from metadata alone; its texts are such that a terminal can show them.

    Attributes:
        name: The plugin's name.
        load: Imports and returns the plugin module.
        value: What the entry point names, for messages.
        distribution: The distribution that provides it.
        version: That distribution's version.
        location: Where its metadata lies.
    """

    name: str = attrs.field(converter=_said)
    load: Callable[[], object] = attrs.field(eq=False, repr=False)
    value: str = attrs.field(default="", converter=_said)
    distribution: str = attrs.field(default="", converter=_said)
    version: str = attrs.field(default="", converter=_said)
    location: str = ""

    def __str__(self) -> str:
        """`'name' (distribution 1.2, entry point module)`."""
        origin = f"{self.distribution} {self.version}, " if self.distribution else ""
        return f"{self.name!r} ({origin}entry point {self.value or 'given by hand'})"


@attrs.frozen(kw_only=True)
class Loaded:
    """A plugin module that was imported."""

    found: Found
    module: object


@attrs.frozen(kw_only=True)
class Failed:
    """A plugin that could not be used, with what stopped it.

    Attributes:
        found: Which plugin.
        stage: `load`, `register` (hooks and declaration) or `conflict`.
        error: The exception, kept so that asking for the plugin raises it as the cause.
        traceback: Its formatted traceback.
    """

    found: Found
    stage: str
    error: BaseException
    traceback: str

    @classmethod
    def because(cls, found: Found, stage: str, error: BaseException) -> Failed:
        """From an exception that is being handled."""
        lines = traceback.format_exception(error)
        return cls(found=found, stage=stage, error=error, traceback=harmless("".join(lines)))

    def __str__(self) -> str:
        """One line: class and text of the error."""
        return " ".join(in_words(self.error).split())


#: A plugin module needs neither torch nor a kernel library; one that takes longer to import is noticed.
SLOW_SECONDS = 2.0
#: Characters of what a plugin prints that a warning shows.
_SHOWN = 80

_LOADING: ContextVar[str] = ContextVar("loading", default="")


@contextlib.contextmanager
def being_loaded(found: Found) -> Iterator[None]:
    """Inside, `find` refuses: a plugin that asks for all plugins while it is loaded would load itself again."""
    token = _LOADING.set(str(found))
    try:
        yield
    finally:
        _LOADING.reset(token)


def find(allowed: Iterable[str] | None = None, asked_by: str = "the list of plugins") -> tuple[Found, ...]:
    """Every entry point of the group, sorted by name; nothing is imported.

    One distribution seen twice (two metadata folders on the path) counts once.

    Args:
        allowed: Names to keep; None for all, empty for none.
        asked_by: Where `allowed` comes from, for the message.

    Raises:
        UnknownNameError: `allowed` names a plugin that is not installed.
        PluginError: A plugin asks for the plugins while it is being loaded.
    """
    if _LOADING.get():
        raise PluginError(f"plugin {_LOADING.get()} asks for all plugins while it is being loaded; do that later")
    unique: dict[tuple[str, str, str], Found] = {}
    for entry_point in _entry_points():
        found = _found(entry_point)
        unique.setdefault((found.name, found.value, found.distribution), found)
    everything = sorted(unique.values(), key=lambda found: (found.name, found.distribution, found.value))
    if allowed is None:
        return tuple(everything)
    wanted = set(allowed)
    for name in sorted(wanted - {found.name for found in everything}):
        known = (found.name for found in everything)
        raise UnknownNameError(
            "plugin", name, known, hint=f"It is named by {asked_by}; plugins are packages to be installed."
        )
    return tuple(found for found in everything if found.name in wanted)


def _entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    try:
        return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    except Exception:
        # One unreadable metadata folder stops the library's own search, whatever package it belongs to.
        return [point for distribution in importlib.metadata.distributions() for point in _readable(distribution)]


def _readable(distribution: importlib.metadata.Distribution) -> Iterable[importlib.metadata.EntryPoint]:
    try:
        return distribution.entry_points.select(group=ENTRY_POINT_GROUP)
    except Exception as error:
        location = getattr(distribution, "_path", "unknown place")
        warnings.warn(f"entry points of {location} cannot be read, its plugins are not seen: {error}", stacklevel=2)
        return ()


def _found(entry_point: importlib.metadata.EntryPoint) -> Found:
    distribution = entry_point.dist
    name, version = _name_and_version(distribution) if distribution else ("", "")
    return Found(
        name=entry_point.name,
        load=functools.partial(_module_of, entry_point),
        value=entry_point.value,
        distribution=name,
        version=version,
        location=str(getattr(distribution, "_path", "")) if distribution else "",
    )


def _module_of(entry_point: importlib.metadata.EntryPoint) -> object:
    if entry_point.pattern.match(entry_point.value) is None:
        raise PluginError(f"the entry point names {entry_point.value!r}, expected a module: 'package.module'")
    return entry_point.load()


def _name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """As its metadata says; a file that is broken hides a plugin's name, not the plugin."""
    try:
        return distribution.name or "", distribution.version or ""
    except Exception as error:
        location = getattr(distribution, "_path", "unknown place")
        warnings.warn(f"metadata of {location} cannot be read, its version is unknown: {error}", stacklevel=2)
        return "", ""


def load(found: Found) -> Loaded | Failed:
    """Import one plugin; whatever it raises but `KeyboardInterrupt` is its own failure and nobody else's."""
    try:
        with watched(found, "importing"):
            module = found.load()
    except BaseException as error:
        # One plugin must not stop the others, an exit of its own included; the user may stop all.
        if is_interrupt(error):
            raise
        return Failed.because(found, "load", error)
    return Loaded(found=found, module=module)


@contextlib.contextmanager
def watched(found: Found, doing: str) -> Iterator[None]:
    """Around what a plugin does while commands start.

    What it prints does not reach stdout, where a command may be writing a document; a warning says so. Nothing stops
    it, however long it takes: another warning names it if that is longer than `SLOW_SECONDS`, interrupted or not.

    Args:
        found: The plugin.
        doing: What is done, for the warnings: `importing`.
    """
    printed, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        seconds = time.perf_counter() - start
        if seconds > SLOW_SECONDS:
            text = f"{doing} plugin {found} took {seconds:.1f} s; everything heavy belongs inside its other hooks"
            warnings.warn(text, stacklevel=4)
        if not printed.closed and printed.getvalue():
            warnings.warn(f"{doing} plugin {found} printed {printed.getvalue()[:_SHOWN]!r}", stacklevel=4)
