"""Where `moe-core tune` keeps its times: added to what the file holds, written after every token count."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from pathlib import Path

import attrs

from moe_core.environment import Environment
from moe_core.errors import SpecError
from moe_core.manager import BackendManager
from moe_core.measurement_files import MeasurementFile, changes_since, plugins_of


class Recorder:
    """A file of measured times that grows.

    Attributes:
        path: Where it is.
        replaced: Why what lay there is not kept, "" if it is.
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
        _check_writable(path)
        versions = manager.versions()
        self.replaced = ""
        self._file = MeasurementFile(environment=environment, plugins=versions, date="", times={})
        self._read()

    def _read(self) -> None:
        """Take over what the file holds, as far as it is of this machine as it is now."""
        path, environment, versions = self.path, self._file.environment, self._file.plugins
        if not path.exists():
            return
        try:
            found = MeasurementFile.read(path)
        except SpecError as error:
            self.replaced = str(error)
            return
        changes = ", ".join(changes_since(found.environment, environment))
        if changes:
            self.replaced = f"{path}: the machine has changed: {changes}"
            return
        kept, changed = found.without_changed_plugins(versions)
        if changed:
            self.replaced = f"{path}: times of other versions of {changed}"
        self._file = attrs.evolve(self._file, times=kept.times, date=found.date)

    @property
    def num_times(self) -> int:
        """How many times the file holds."""
        return self._file.num_times

    def add(self, shape: str, num_tokens: int, microseconds: Mapping[str, float]) -> None:
        """Put the times of one layer at one token count in place of earlier ones, and write the file.

        Raises:
            SpecError: It cannot be written; what it held before is still there.
        """
        # Another process may have added its own meanwhile.
        self._read()
        of_shape = {
            candidate: {count: time for count, time in times.items() if count != num_tokens}
            for candidate, times in self._file.times.get(shape, {}).items()
        }
        for candidate, time in microseconds.items():
            of_shape.setdefault(candidate, {})[num_tokens] = time
        times = {**self._file.times, shape: {name: found for name, found in of_shape.items() if found}}
        today = datetime.datetime.now().astimezone().date().isoformat()
        self._file = attrs.evolve(self._file, times=times, date=today)
        try:
            attrs.evolve(self._file, plugins=self._plugins_used()).write(self.path)
        except OSError as error:
            raise SpecError(f"times cannot be written to {self.path}: {error}; say --output FILE") from error

    def _plugins_used(self) -> dict[str, str]:
        """Versions of those plugins alone that have times: another one coming or going changes nothing."""
        used = {plugin for of_shape in self._file.times.values() for name in of_shape for plugin in plugins_of(name)}
        return {name: version for name, version in self._file.plugins.items() if name in used}


def _check_writable(path: Path) -> None:
    """Before anything is measured."""
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"times cannot be written to {path}: {error}; say --output FILE") from error
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise SpecError(f"times cannot be written to {path}: no file can be made there; say --output FILE")
