"""What a benchmark found, as values that JSON holds: on which machine, and one row for each figure."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import attrs
import torch

from moe_core.bench import OURS
from moe_core.environment import Environment
from moe_core.errors import SpecError, counted
from moe_core.installed import installed_packages
from moe_core.json_files import JsonValue, read_json, shown
from moe_core.tuning.ceilings import Ceilings
from moe_core.tuning.timing import Timing, fastest_of
from moe_core.whole_file import write_whole

SCHEMA = 1
#: How the problem of a row begins that nobody tried.
NOT_RUN = "not run: "


@attrs.frozen(kw_only=True)
class Machine:
    """Where and with what a benchmark ran: what a caption has to say.

    Attributes:
        device: Name of the card or of the processor.
        arch: Device generation, or device type where there is none.
        threads: Threads of torch, for figures of a CPU.
        clock: What counted the time of calls that were not captured.
        versions: Of Python, moe-core, torch and every package that took part.
        ceilings: The rates that floors follow from, measured in the same run.
        date: Of the run, ISO.
    """

    device: str
    arch: str
    threads: int
    clock: str
    versions: dict[str, str]
    ceilings: Ceilings
    date: str = attrs.field(factory=lambda: datetime.date.today().isoformat())

    @classmethod
    def here(cls, environment: Environment, ceilings: Ceilings, clock: str, modules: tuple[str, ...]) -> Machine:
        """This machine.

        Args:
            environment: As it was probed.
            ceilings: Its rates.
            clock: As the attribute.
            modules: Import names of packages that take part, besides those of `environment`.
        """
        versions = {
            "python": platform.python_version(),
            "moe-core": importlib.metadata.version("moe-core"),
            **dict(environment.packages),
            **installed_packages(modules),
        }
        return cls(
            device=environment.device_name,
            arch=environment.arch or environment.device_type,
            threads=torch.get_num_threads(),
            clock=clock,
            versions=versions,
            ceilings=ceilings,
        )

    @property
    def caption(self) -> str:
        """Everything in one line."""
        threads = f", {counted(self.threads, 'thread')}" if self.arch == "cpu" else ""
        versions = ", ".join(f"{name} {version}".strip() for name, version in self.versions.items())
        return f"{self.device}{threads}; {versions}; {self.ceilings} measured in this run; {self.date}"


@attrs.frozen(kw_only=True)
class Row:
    """One implementation on one layer with one number of tokens.

    Attributes:
        layer: Name of the layer's sizes.
        scheme: Label of the weights' scheme.
        num_tokens: T.
        implementation: What ran: a peer, or `moe-core` as the resolver chooses or as it was pinned.
        runs: The combination that ran with so many tokens, or the version of a peer.
        floor: Microseconds that nothing can be much below.
        timing: The samples; None where there is no figure.
        error: Relative error of the result's norm against the layer in fp32.
        problem: Why there is no figure; begins with `not run: ` where nothing was tried, and with `wrong result: `.
        note: What to know about the figure.
        issue_microseconds: Time of the host per call outside a graph, if it was asked for.
        held_bytes: Most memory that a forward held beside weights and inputs, its output included, if asked for.
        activation_bytes: What the rows between the products take, unavoidably or not: 2I + I + H values per routed row.
    """

    layer: str
    scheme: str
    num_tokens: int
    implementation: str
    runs: str
    floor: float
    timing: Timing | None = None
    error: float | None = None
    problem: str = ""
    note: str = ""
    issue_microseconds: float | None = None
    held_bytes: int | None = None
    activation_bytes: int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is a combination of moe-core's own."""
        return self.implementation == OURS or self.implementation.startswith(f"{OURS} ")

    @property
    def place(self) -> tuple[str, str, int]:
        """What it shares with the rows of others that it is compared with."""
        return self.layer, self.scheme, self.num_tokens

    @property
    def series(self) -> tuple[str, str, str]:
        """What it shares with the rows of the same at other numbers of tokens."""
        return self.layer, self.scheme, self.implementation

    @property
    def went_wrong(self) -> bool:
        """Whether it was tried and failed, or gave a wrong result."""
        return bool(self.problem) and not self.problem.startswith(NOT_RUN)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the median of the samples, bounds of it, and their spread beside them."""
        data = attrs.asdict(self)
        if self.timing is not None:
            data["microseconds"], data["spread"] = self.timing.microseconds, self.timing.spread
            data["bounds"] = list(self.timing.bounds)
        return data

    @classmethod
    def from_json(cls, data: JsonValue) -> Row:
        """Read what `to_json` gave; raises `SpecError` that names the place."""
        return cls(
            layer=data["layer"].name(),
            scheme=data["scheme"].name(),
            num_tokens=data["num_tokens"].whole(1),
            implementation=data["implementation"].name(),
            runs=data["runs"].name(),
            floor=data["floor"].above_zero(),
            timing=data["timing"].optional(_timing),
            error=data["error"].optional(JsonValue.not_below_zero),
            problem=data["problem"].text(),
            note=data["note"].text(),
            issue_microseconds=data["issue_microseconds"].optional(JsonValue.above_zero),
            held_bytes=data["held_bytes"].optional(lambda value: value.whole(0)),
            activation_bytes=data["activation_bytes"].optional(lambda value: value.whole(1)),
        )


def _timing(data: JsonValue) -> Timing:
    samples = tuple(sample.above_zero() for sample in data["samples"].elements())
    if not samples:
        data["samples"].refuse("at least one sample")
    return Timing(samples, data["method"].name())


def _machine(data: JsonValue) -> Machine:
    ceilings = data["ceilings"]
    return Machine(
        device=data["device"].name(),
        arch=data["arch"].name(),
        threads=data["threads"].whole(1),
        clock=data["clock"].name(),
        versions={name: version.name() for name, version in data["versions"].fields().items()},
        ceilings=Ceilings(
            bytes_per_us=ceilings["bytes_per_us"].above_zero(),
            flops_per_us={word: rate.above_zero() for word, rate in ceilings["flops_per_us"].fields().items()},
        ),
        date=data["date"].name(),
    )


@attrs.frozen
class Report:
    """All rows of one run."""

    machine: Machine
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data, with which rows are the fastest for all that samples tell; `read` takes it back."""
        machine = attrs.asdict(self.machine)
        fastest = self.fastest()
        rows = [{**row.to_json(), "fastest": row.implementation in fastest[row.place]} for row in self.rows]
        return {"schema": SCHEMA, "machine": machine, "rows": rows}

    def fastest(self) -> dict[tuple[str, str, int], tuple[str, ...]]:
        """`Row.place` -> the fastest there, then those that samples do not tell from it."""
        beside: dict[tuple[str, str, int], dict[str, Timing]] = {row.place: {} for row in self.rows}
        for row in self.rows:
            if row.timing is not None:
                beside[row.place][row.implementation] = row.timing
        return {place: fastest_of(timings) for place, timings in beside.items()}

    def failures(self) -> dict[str, list[int]]:
        """What of moe-core's own went wrong, or has no figure at all -> at which numbers of tokens."""
        found: dict[str, list[int]] = {}
        ours = [row for row in self.rows if row.is_ours and row.problem]
        timed = {row.series for row in self.rows if row.timing is not None}
        for row in ours:
            if row.went_wrong or row.series not in timed:
                found.setdefault(f"{row.implementation}, {row.layer}, {row.scheme}: {row.problem}", []).append(
                    row.num_tokens
                )
        return found

    def write(self, path: Path) -> None:
        """Write the JSON to a file, whole or not at all; raises `UnwrittenError`."""
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a file that `write` wrote; raises `SpecError` if it is none."""
        try:
            data = JsonValue(read_json(path))
            schema = data["schema"]
            if schema.whole(0) != SCHEMA:
                raise SpecError(f"schema {shown(schema.content)}, this version reads {SCHEMA}")
            return cls(_machine(data["machine"]), tuple(map(Row.from_json, data["rows"].elements())))
        except OSError as error:
            raise SpecError(f"results {path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise SpecError(f"results {path}: not the JSON of moe-core bench ({error})") from error
