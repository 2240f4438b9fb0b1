"""Where `moe-core tune` keeps its times: added to what the file holds, written after every token count."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs

from moe_core.environment import Environment
from moe_core.errors import SpecError
from moe_core.manager import BackendManager
from moe_core.measurement_files import MeasurementFile, Times, changes_since, plugins_of
from moe_core.measurements import MeasurementTable, Time
from moe_core.whole_file import check_writable

#: How often a lock is tried, and seconds between.
_TRIES, _PAUSE = 20, 0.05


class Recorder:
    """A file of measured times that grows.

    Attributes:
        path: Where it is.
        aside: Where what lies there and does not count any more is kept when it is written over, one such file.
        replaced: Why what lay there at first does not count, "" if it does.
        is_shared: Whether somebody else has written the file since this one began.
    """

    def __init__(self, path: Path, environment: Environment, manager: BackendManager) -> None:
        """Read what is there, if it is of this machine as it is now.

        Args:
            path: The file; it need not exist.
            environment: This machine.
            manager: The plugins that are measured.

        Raises:
            SpecError: No file can be written there.
        """
        self.path = path
        self.aside = path.with_suffix(f".old{path.suffix}")
        self.is_shared = False
        _check_writable(path)
        self._environment, self._plugins = environment, manager.versions()
        self._added: dict[str, dict[int, Mapping[str, Time]]] = {}
        self._wrong: dict[str, set[str]] = {}
        self._file, self.replaced = self._there()
        self._state = _state(path)

    def _there(self) -> tuple[MeasurementFile, str]:
        """What the file holds that still counts, and why the rest does not."""
        path = self.path
        nothing = MeasurementFile(environment=self._environment, plugins=self._plugins, date="", times={})
        if not path.exists():
            return nothing, ""
        try:
            found = MeasurementFile.read(path)
        except SpecError as error:
            return nothing, str(error)
        changes = ", ".join(changes_since(found.environment, self._environment))
        if changes:
            return nothing, f"{path}: the machine has changed: {changes}"
        kept, changed = found.without_changed_plugins(self._plugins)
        replaced = f"{path}: times of other versions of {changed}" if changed else ""
        return attrs.evolve(nothing, times=kept.times, date=found.date), replaced

    @property
    def num_times(self) -> int:
        """How many times the file holds."""
        return self._file.num_times

    def table(self, shape: str) -> MeasurementTable:
        """What the file holds of one shape, as plans see it."""
        of_shape = {shape: self._file.times[shape]} if shape in self._file.times else {}
        return attrs.evolve(self._file, times=of_shape).table(self.path.name)

    def add(self, shape: str, num_tokens: int, times: Mapping[str, Time], wrong: Iterable[str] = ()) -> None:
        """Put the times of one layer at one token count in place of earlier ones, and write the file.

        What another process has added since is kept: each brings all of its own every time. What does not count is put
        aside.

        Args:
            shape: Of the layer, as `shape_key` says it.
            num_tokens: The token count.
            times: Full name of the candidate -> its time.
            wrong: Full names of candidates whose results are wrong: times that they have of this shape, at any token
                count, are taken away.

        Raises:
            UnwrittenError: The file cannot be written; the next time brings what could not be.
        """
        self._added.setdefault(shape, {})[num_tokens] = times
        self._wrong.setdefault(shape, set()).update(wrong)
        with _alone_in(self.path.absolute().parent):
            found, unfit = self._there()
            self.is_shared |= _state(self.path) not in (None, self._state)
            today = datetime.datetime.now().astimezone().date().isoformat()
            self._file = attrs.evolve(found, times=self._with_added(found.times), date=today)
            if unfit:
                self._put_aside()
            if self._file.times or self.path.exists():
                attrs.evolve(self._file, plugins=self._plugins_used()).write(self.path)
            self._state = _state(self.path)

    def _put_aside(self) -> None:
        """A second name for the file that is written over: it takes no room, and nothing is gone if writing fails."""
        with contextlib.suppress(OSError):
            self.aside.unlink(missing_ok=True)
            self.aside.hardlink_to(self.path.resolve())

    def _with_added(self, found: Times) -> Times:
        times = dict(found)
        for shape, of_counts in self._added.items():
            of_shape = {
                candidate: {count: time for count, time in counted.items() if count not in of_counts}
                for candidate, counted in found.get(shape, {}).items()
            }
            for count, of_count in of_counts.items():
                for candidate, measured in of_count.items():
                    of_shape.setdefault(candidate, {})[count] = measured
            wrong = self._wrong[shape]
            times[shape] = {name: counted for name, counted in of_shape.items() if counted and name not in wrong}
        return {shape: of_shape for shape, of_shape in times.items() if of_shape}

    def _plugins_used(self) -> dict[str, str]:
        """Versions of those plugins alone that have times: another one coming or going changes nothing."""
        used = {plugin for of_shape in self._file.times.values() for name in of_shape for plugin in plugins_of(name)}
        return {name: version for name, version in self._file.plugins.items() if name in used}


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other runs from writing between a look at the file and its writing.

    A lock that others hold is waited for a second at most, and where a system or file system has none, or the folder is
    gone, all goes on without: a cache is in nobody's way.
    """
    try:
        import fcntl

        opened = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        for _ in range(_TRIES):
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(_PAUSE)
        yield
    finally:
        os.close(opened)


def _state(path: Path) -> tuple[int, int] | None:
    """Another one after each writing, None where nothing lies."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _check_writable(path: Path) -> None:
    """Before anything is measured."""
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"times cannot be written to {path}: {error}; say --output FILE") from error
    check_writable(path.absolute(), f"times cannot be written to {path}; say --output FILE")
