"""Files of measured times: what they hold, and how they are read, written and compared with a machine.

A file is of one machine. `measurement_sources` says which files count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import attrs

from moe_core.environment import Environment
from moe_core.errors import SpecError, UnwrittenError, counted
from moe_core.json_files import ENCODING, JsonValue, parse_json, shown
from moe_core.measurements import Measurement, MeasurementTable, Time
from moe_core.regular_file import require_regular
from moe_core.whole_file import write_whole

SCHEMA = 1
#: Largest file that is read (a quarter of a million times, a few seconds), and largest token count in it.
_MOST_BYTES, _MOST_TOKENS = 4 << 20, 1 << 31
#: How a token count is written, of which `_MOST_TOKENS` has ten digits.
_COUNT = re.compile("[1-9][0-9]{0,9}")
#: Shape -> candidate -> token count -> time.
Times: TypeAlias = Mapping[str, Mapping[str, Mapping[int, Time]]]


@attrs.frozen(kw_only=True)
class MeasurementFile:
    """What one file holds.

    Attributes:
        environment: The machine that was measured.
        plugins: Plugin name -> its distribution and version then.
        date: Day of the newest time, ISO 8601.
        times: Of one layer forward, by `shape_key`, full name of the candidate, and tokens. In the file each is a
            number of microseconds or, with its bounds, the list `[median, low, high]`.
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
            data = parse_json(_text(path))
        except OSError as error:
            raise SpecError(f"measurements {path}: cannot be read ({error.strerror or error})") from error
        except ValueError as error:
            raise SpecError(f"measurements {path}: cannot be read as the JSON of moe-core tune ({error})") from error
        try:
            return cls._of(JsonValue(data), str(path))
        except SpecError as error:
            raise SpecError(f"measurements {path}: {error}; run moe-core tune again") from error

    @classmethod
    def _of(cls, data: JsonValue, source: str) -> MeasurementFile:
        schema = data.fields().get("schema", JsonValue(None)).content
        if type(schema) is not int or schema != SCHEMA:
            raise SpecError(f"expected schema {SCHEMA}, got {shown(schema)}")
        return cls(
            environment=Environment.from_json(data["environment"].content, source=source),
            plugins={name: version.name() for name, version in data["plugins"].fields().items()},
            date=data["date"].name(),
            times={
                shape: {candidate: _read_times(times) for candidate, times in of_shape.fields().items()}
                for shape, of_shape in data["times"].fields().items()
            },
        )

    def to_text(self) -> str:
        """The file's content: JSON, one line per candidate."""
        machine = {name: value for name, value in self.environment.to_json().items() if name != "source"}
        head = {"schema": SCHEMA, "environment": machine, "plugins": dict(self.plugins), "date": self.date}
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        shapes = [_shape_text(shape, of_shape) for shape, of_shape in self.times.items()]
        return "\n".join(["{", *lines, '  "times": {', ",\n".join(shapes), "  }", "}"]) + "\n"

    def write(self, path: Path) -> None:
        """Write the file whole or not at all; folders are made. Raises `UnwrittenError`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnwrittenError(f"{path}: cannot be written ({error})") from error
        write_whole(path, self.to_text())

    @property
    def machine(self) -> str:
        """`NVIDIA H100 80GB HBM3, torch 2.11.0, triton 3.6.0, 2026-11-28`."""
        return ", ".join(filter(None, (self.environment.card, _versions(self.environment), self.date)))

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
                microseconds=time.microseconds,
                bounds=time.bounds,
                source=f"{source}, {self.environment.card}, {self.date}",
            )
            for shape, of_shape in self.times.items()
            for candidate, times in of_shape.items()
            for num_tokens, time in times.items()
        ]
        amount = f"{counted(len(rows), 'time')} of {counted(len(self.times), 'shape')}"
        return MeasurementTable(rows, (f"{source}: {amount}, {self.machine}",))

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


def changes_since(then: Environment, now: Environment) -> Iterator[str]:
    """What differs between the machine that was measured and this one; packages that came since do not count."""
    for field in ("device_type", "arch", "device_name", "driver", "threads"):
        before, after = getattr(then, field), getattr(now, field)
        if before != after:
            yield f"{field} {before or 'unknown'} there, {after or 'unknown'} here"
    for module, version in then.packages:
        here = now.version(module)
        if here != version:
            yield f"{module} {version} there, {here or 'not installed'} here"


def is_of_card(measured: Environment, asked: Environment) -> bool:
    """Whether times of one machine may speak for another: `NVIDIA H100` is any H100, but a PCIe card is no SXM one.

    A CPU with another number of threads is another one, unless nobody knows the number of either.
    """
    if (measured.device_type, measured.arch) != (asked.device_type, asked.arch):
        return False
    if measured.threads and asked.threads and measured.threads != asked.threads:
        return False
    one, other = measured.device_name.split(), asked.device_name.split()
    common = min(len(one), len(other))
    return common > 0 and one[:common] == other[:common]


def _text(path: Path) -> str:
    require_regular(path)
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise OSError(f"it has {size} bytes, at most {_MOST_BYTES} are read")
    return path.read_text(encoding=ENCODING)


def _read_times(data: JsonValue) -> dict[int, Time]:
    return {_token_count(text, data.place): _read_time(time) for text, time in data.fields().items()}


def _read_time(data: JsonValue) -> Time:
    if not isinstance(data.content, list):
        return Time(data.above_zero())
    numbers = [number.above_zero() for number in data.elements()]
    if len(numbers) != 3 or not numbers[1] <= numbers[0] <= numbers[2]:
        raise SpecError(f"{data.place}: expected [median, low bound, high bound], got {numbers}")
    median, low, high = numbers
    return Time(median, (low, high))


def _token_count(text: str, place: str) -> int:
    # ` 1` or `01` beside `1` would be one count with two times.
    if not _COUNT.fullmatch(text) or int(text) >= _MOST_TOKENS:
        raise SpecError(f"{place}: expected token counts from 1 to below {_MOST_TOKENS}, got {shown(text)}")
    return int(text)


def _shape_text(shape: str, of_shape: Mapping[str, Mapping[int, Time]]) -> str:
    lines = [f"      {json.dumps(candidate)}: {_times_text(times)}" for candidate, times in sorted(of_shape.items())]
    return "\n".join([f"    {json.dumps(shape)}: {{", ",\n".join(lines), "    }"])


def _times_text(times: Mapping[int, Time]) -> str:
    return json.dumps({str(count): _time_json(times[count]) for count in sorted(times)})


def _time_json(time: Time) -> float | list[float]:
    median, *bounds = [float(f"{number:.4g}") for number in (time.microseconds, *(time.bounds or ()))]
    return [median, *bounds] if bounds else median


def _versions(environment: Environment) -> str:
    named = ((module, environment.version(module)) for module in ("torch", "triton"))
    return ", ".join(f"{module} {version}" for module, version in named if version)
