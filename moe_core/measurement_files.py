"""Files of measured times: the user's, which `moe-core tune` writes, and those that ship with the package.

A file is of one machine. The user's counts only where nothing has changed since: card, driver, versions. A shipped one
counts for its card, whatever the versions: kernels change, their order on one card seldom does, and the decision says
what it was measured with. A file that does not fit is reported and not used.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from moe_core.environment import Environment
from moe_core.errors import SpecError
from moe_core.measurements import Measurement, MeasurementTable

SCHEMA = 1
SHIPPED = Path(__file__).parent / "tables"

#: Shape -> candidate -> token count -> microseconds.
Times = Mapping[str, Mapping[str, Mapping[int, float]]]


class MeasurementWarning(UserWarning):
    """A file of measured times is not used; the message says why."""


@attrs.frozen(kw_only=True)
class MeasurementFile:
    """What one file holds.

    Attributes:
        environment: The machine that was measured.
        plugins: Plugin name -> its distribution and version then.
        date: Day of the newest time, ISO 8601.
        times: Microseconds of one layer forward, by `shape_key`, full name of the candidate, and tokens.
    """

    environment: Environment
    plugins: Mapping[str, str]
    date: str
    times: Times

    @classmethod
    def read(cls, path: Path) -> MeasurementFile:
        """Read a file.

        Raises:
            SpecError: It cannot be read, is of another version, or holds something else; the message names the place.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise SpecError(f"measurements {path}: cannot be read ({error})") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise SpecError(f"measurements {path}: expected schema {SCHEMA}, got {found!r}; run moe-core tune again")
        try:
            return cls(
                environment=Environment.from_json(data["environment"], source=str(path)),
                plugins={str(name): str(version) for name, version in data["plugins"].items()},
                date=str(data["date"]),
                times={shape: _read_times(of_shape) for shape, of_shape in data["times"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"measurements {path}: {type(error).__name__}: {error}; run moe-core tune again") from error

    def to_text(self) -> str:
        """The file's content: JSON, one line per candidate."""
        machine = {name: value for name, value in self.environment.to_json().items() if name != "source"}
        head = {"schema": SCHEMA, "environment": machine, "plugins": dict(self.plugins), "date": self.date}
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        shapes = [_shape_text(shape, of_shape) for shape, of_shape in self.times.items()]
        return "\n".join(["{", *lines, '  "times": {', ",\n".join(shapes), "  }", "}"]) + "\n"

    def write(self, path: Path) -> None:
        """Write the file whole or not at all; folders are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(self.to_text(), encoding="utf-8")
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    @property
    def machine(self) -> str:
        """`NVIDIA H100 80GB HBM3, torch 2.11.0, triton 3.6.0, 2026-11-28`."""
        return ", ".join(filter(None, (_card(self.environment), _versions(self.environment), self.date)))

    @property
    def num_times(self) -> int:
        """How many times there are."""
        return sum(len(times) for of_shape in self.times.values() for times in of_shape.values())

    def table(self, source: str) -> MeasurementTable:
        """All rows, each with `source` and the machine as where it is from."""
        arch = self.environment.arch or self.environment.device_type
        rows = [
            Measurement(
                candidate=candidate,
                arch=arch,
                shape=shape,
                num_tokens=num_tokens,
                microseconds=microseconds,
                source=f"{source}, {_card(self.environment)}, {self.date}",
            )
            for shape, of_shape in self.times.items()
            for candidate, times in of_shape.items()
            for num_tokens, microseconds in times.items()
        ]
        return MeasurementTable(rows, (f"{source}: {len(rows)} times of {len(self.times)} shapes, {self.machine}",))

    def without_changed_plugins(self, plugins: Mapping[str, str]) -> tuple[MeasurementFile, str]:
        """The file without candidates of plugins whose version is another now, and what they are, "" if none."""
        changed = {name for name, version in self.plugins.items() if name in plugins and plugins[name] != version}
        times = {
            shape: {candidate: t for candidate, t in of_shape.items() if not changed & set(plugins_of(candidate))}
            for shape, of_shape in self.times.items()
        }
        text = ", ".join(f"{name} ({self.plugins[name]} there, {plugins[name]} here)" for name in sorted(changed))
        return attrs.evolve(self, times=times), text


def plugins_of(candidate: str) -> list[str]:
    """The plugins in a candidate's full name."""
    return [part.partition(":")[0] for part in candidate.split(" + ")]


def user_file(environment: Environment) -> Path:
    """Where the user's times for a machine are: below `$XDG_CACHE_HOME`, or `~/.cache`; one file for each card."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # Where nobody knows a home it stays a relative path, at which nothing lies.
    base = Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"))
    words = " ".join(filter(None, (environment.device_type, environment.arch, environment.device_name)))
    return base / "moe-core" / "measurements" / f"{re.sub(r'[^a-z0-9]+', '-', words.lower()).strip('-')}.json"


def default_measurements(environment: Environment, plugins: Mapping[str, str]) -> MeasurementTable:
    """The user's times for a machine and, for shapes that they leave out, those that ship with the package.

    Args:
        environment: The machine.
        plugins: Plugin name -> its distribution and version.

    Returns:
        The table; its origins tell what is in it and what was ignored. Ignoring a file also warns.
    """
    table, problems = MeasurementTable(), []
    path = user_file(environment)
    if os.path.exists(path):
        try:
            table, problem = _own(path, _state(path), environment, tuple(sorted(plugins.items())))
            problems += [problem] if problem else []
        except SpecError as error:
            problems.append(str(error))
    for shipped in sorted(SHIPPED.glob("*.json")):
        try:
            file, of_card = _shipped(shipped, _state(shipped))
        except SpecError as error:
            problems.append(str(error))
            continue
        if is_of_card(file.environment, environment):
            table = table.over(of_card)
    for problem in problems:
        warnings.warn(f"{problem}; what it has of that is not used", MeasurementWarning, stacklevel=2)
    if table.rows and not problems:
        return table
    origins = (*table.origins, *(f"ignored: {problem}" for problem in problems))
    return attrs.evolve(table, origins=origins or ("none for this machine; moe-core tune makes them",))


def explicit_measurements(path: Path, environment: Environment) -> MeasurementTable:
    """The times of one file for its card.

    Raises:
        SpecError: The file cannot be read, or is of another card.
    """
    file = MeasurementFile.read(path)
    if not is_of_card(file.environment, environment):
        asked = _card(environment)
        raise SpecError(f"measurements {path}: they are of {_card(file.environment)}, the machine is {asked}")
    return file.table(path.name)


# Every layer of a model asks anew: a file is read again only when it has changed.
@functools.lru_cache(maxsize=16)
def _shipped(path: Path, state: tuple[int, int]) -> tuple[MeasurementFile, MeasurementTable]:
    file = MeasurementFile.read(path)
    return file, file.table(f"shipped {path.stem}")


@functools.lru_cache(maxsize=16)
def _own(
    path: Path, state: tuple[int, int], environment: Environment, plugins: tuple[tuple[str, str], ...]
) -> tuple[MeasurementTable, str]:
    """The rows of the user's file that still hold, and why others do not."""
    file = MeasurementFile.read(path)
    changes = ", ".join(changes_since(file.environment, environment))
    if changes:
        raise SpecError(f"measurements {path}: the machine has changed: {changes}; run moe-core tune again")
    kept, changed = file.without_changed_plugins(dict(plugins))
    problem = f"measurements {path}: other versions of {changed}; run moe-core tune again" if changed else ""
    return kept.table("your cache"), problem


def _state(path: Path) -> tuple[int, int]:
    """Changes when the file does."""
    try:
        found = path.stat()
    except OSError as error:
        raise SpecError(f"measurements {path}: cannot be read ({error})") from error
    return found.st_mtime_ns, found.st_size


def changes_since(then: Environment, now: Environment) -> Iterator[str]:
    """What differs between the machine that was measured and this one; packages that came since do not count."""
    for field in ("device_type", "arch", "device_name", "driver"):
        before, after = getattr(then, field), getattr(now, field)
        if before != after:
            yield f"{field} {before or 'unknown'} there, {after or 'unknown'} here"
    for module, version in then.packages:
        here = now.version(module)
        if here != version:
            yield f"{module} {version} there, {here or 'not installed'} here"


def is_of_card(measured: Environment, asked: Environment) -> bool:
    """Whether times of one machine may speak for another: `NVIDIA H100` is any H100, but a PCIe card is no SXM one."""
    if (measured.device_type, measured.arch) != (asked.device_type, asked.arch):
        return False
    one, other = measured.device_name.split(), asked.device_name.split()
    common = min(len(one), len(other))
    return common > 0 and one[:common] == other[:common]


def _read_times(of_shape: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    return {
        candidate: {_token_count(count): _time(time) for count, time in times.items()}
        for candidate, times in of_shape.items()
    }


def _token_count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise SpecError(f"expected a token count >= 1, got {count}")
    return count


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise SpecError(f"expected microseconds > 0, got {value!r}")
    return float(value)


def _shape_text(shape: str, of_shape: Mapping[str, Mapping[int, float]]) -> str:
    lines = [f"      {json.dumps(candidate)}: {_times_text(times)}" for candidate, times in sorted(of_shape.items())]
    return "\n".join([f"    {json.dumps(shape)}: {{", ",\n".join(lines), "    }"])


def _times_text(times: Mapping[int, float]) -> str:
    return json.dumps({str(count): float(f"{times[count]:.4g}") for count in sorted(times)})


def _card(environment: Environment) -> str:
    return environment.device_name or environment.arch or environment.device_type


def _versions(environment: Environment) -> str:
    named = ((module, environment.version(module)) for module in ("torch", "triton"))
    return ", ".join(f"{module} {version}" for module, version in named if version)
