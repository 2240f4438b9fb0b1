"""Find and load plugins: two functions, three types. Finding imports nothing; loading imports one module."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar

import attrs

from moe_core.errors import PluginError, UnknownNameError
from moe_core.hookspecs import ENTRY_POINT_GROUP


@attrs.frozen(kw_only=True)
class Found:
    """An entry point, known from metadata alone.

    Attributes:
        name: The plugin's name.
        load: Imports and returns the plugin module.
        value: What the entry point names, for messages.
        distribution: The distribution that provides it.
        version: That distribution's version.
        location: Where its metadata lies.
    """

    name: str
    load: Callable[[], object] = attrs.field(eq=False, repr=False)
    value: str = ""
    distribution: str = ""
    version: str = ""
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
        return cls(found=found, stage=stage, error=error, traceback="".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        """One line: class and text of the error."""
        return f"{type(self.error).__name__}: {self.error}"


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
        raise UnknownNameError("plugin", name, known, hint=f"It is named by {asked_by}.")
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
        load=entry_point.load,
        value=entry_point.value,
        distribution=name,
        version=version,
        location=str(getattr(distribution, "_path", "")) if distribution else "",
    )


def _name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """As its metadata says; a file that is broken hides a plugin's name, not the plugin."""
    try:
        return distribution.name or "", distribution.version or ""
    except Exception as error:
        location = getattr(distribution, "_path", "unknown place")
        warnings.warn(f"metadata of {location} cannot be read, its version is unknown: {error}", stacklevel=2)
        return "", ""


def load(found: Found) -> Loaded | Failed:
    """Import one plugin; whatever it raises, `sys.exit` included, is its own failure and nobody else's.

    What it prints does not reach stdout, where a command may be writing a document; a warning says so, and another one
    names a plugin whose import takes longer than `SLOW_SECONDS`.
    """
    printed, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(printed):
            module = found.load()
        _warn_of(found, time.perf_counter() - start, printed.getvalue())
    except (Exception, SystemExit) as error:
        return Failed.because(found, "load", error)
    return Loaded(found=found, module=module)


def _warn_of(found: Found, seconds: float, printed: str) -> None:
    if seconds > SLOW_SECONDS:
        text = f"importing plugin {found} took {seconds:.1f} s; everything heavy belongs inside its hooks"
        warnings.warn(text, stacklevel=3)
    if printed:
        warnings.warn(f"plugin {found} printed on import: {printed[:_SHOWN]!r}", stacklevel=3)
