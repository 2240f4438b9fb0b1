"""`moe-core verify`: the conformance kit for installed backends, on this machine or a described one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from xml.etree import ElementTree

import attrs
import typer
from rich.console import Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from moe_core.cli.options import Verbose
from moe_core.cli.output import fields, print_error, print_json, stderr, stdout, table
from moe_core.cli.plan_view import machine_fields
from moe_core.environment import Environment, load_environment
from moe_core.errors import SpecError
from moe_core.manager import BackendManager, default_manager

if TYPE_CHECKING:
    from moe_core.testing.outcome import Result

SCHEMA = 1
_STATUSES = ("passed", "failed", "not run")


@attrs.frozen
class Report:
    """The results of one backend on one machine."""

    name: str
    environment: Environment
    results: tuple[Result, ...]

    @property
    def counts(self) -> Counter[str]:
        """Status -> number of results."""
        return Counter(result.status for result in self.results)

    @property
    def status(self) -> str:
        """`failed`, `not run` if no layer could be tried, else `passed`."""
        if self.counts["failed"]:
            return "failed"
        ran = any(result.status == "passed" and result.subject != self.name for result in self.results)
        return "passed" if ran else "not run"


def verify(
    backends: Annotated[
        list[str] | None, typer.Argument(metavar="[BACKEND]...", help="Plugins to check; default: all installed ones.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Vary scheme, activation and dtype one at a time, not all with all.")
    ] = False,
    device: Annotated[
        str | None, typer.Option("--device", metavar="TYPE", help="Device of all tensors; default: the accelerator.")
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option("--environment", metavar="NAME", help="Resolve for this machine: a preset or a JSON file."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Processes on a CPU; default: one for each core.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit XML report for a CI system.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Check that installed backends do what they declare.

    Every declared combination of dispatcher, runner, scheme, activation and dtype is compared with a float64 layer.
    What cannot run on this machine is reported as not run, with the reason. Exit code 1: a check failed, or a named
    backend could not run at all.
    """
    if junit is not None and not junit.absolute().parent.is_dir():
        raise SpecError(f"--junit {junit}: folder {junit.parent} does not exist")
    manager = default_manager()
    names = backends or [spec.name for spec in manager.specs() if spec.dispatchers or spec.runners]
    for name in names:
        manager.require(name)
    machine = None if environment is None else load_environment(environment)
    reports = [_run(manager, name, quick, machine, device, jobs) for name in dict.fromkeys(names)]
    if junit is not None:
        junit.write_bytes(_junit(reports))
    if as_json:
        print_json(_json(reports))
    else:
        stdout().print(Group(*(_view(report, verbose) for report in reports)))
    unusable = [] if backends else [failed.found.name for failed in manager.failures()]
    if unusable:
        print_error(f"plugins that could not be loaded: {', '.join(unusable)}; see moe-core list-backends -v")
    bad = {"failed", "not run"} if backends else {"failed"}
    if unusable or any(report.status in bad for report in reports):
        raise typer.Exit(1)


def _run(
    manager: BackendManager, name: str, quick: bool, machine: Environment | None, device: str | None, jobs: int | None
) -> Report:
    """All cases of one backend, with a bar on stderr that says which check is done."""
    from moe_core.testing.kit import Kit
    from moe_core.testing.parallel import run_cases

    module: Any = manager.found(name).load()
    kit = Kit(module, environment=machine, device=device, quick=quick)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results: list[Result] = []
    console = stderr()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=len(kit.cases()))
        failed = 0
        for result in run_cases(kit, jobs or len(os.sched_getaffinity(0))):
            results.append(result)
            failed += result.status == "failed"
            note = f", [red]{failed} failed[/red]" if failed else ""
            progress.update(task, advance=1, description=f"{name}: {result.check}{note}")
    return Report(name, kit.backend.environment, tuple(results))


def _view(report: Report, verbose: bool) -> RenderableType:
    seconds = sum(result.seconds for result in report.results)
    summary = ", ".join(f"{report.counts[status]} {status}" for status in _STATUSES)
    title = Text.assemble("\n", (report.name, "bold"), ": ", _coloured(report.status), f" ({summary}, {seconds:.0f} s)")
    rows = table("", "PASSED", "FAILED", "NOT RUN", "WHY NOT")
    for subject, results in _by_pair(report.results).items():
        counts = Counter(result.status for result in results)
        whole = [result.text for result in results if result.status == "not run"]
        why = whole[0] if whole and len(whole) == len(results) else ""
        rows.add_row(subject, *(str(counts[status] or "-") for status in _STATUSES), why)
    details = list(report.results) if verbose else _first_failures(report.results)
    return Group(title, machine_fields(report.environment), rows, *map(_detail, details))


def _first_failures(results: Iterable[Result]) -> list[Result]:
    """The first failure of each check, with the number of the others."""
    by_check: dict[str, list[Result]] = {}
    for result in results:
        if result.status == "failed":
            by_check.setdefault(result.check, []).append(result)
    return [
        attrs.evolve(first, text=f"{first.text} (and {len(others)} more: -v)" if others else first.text)
        for first, *others in by_check.values()
    ]


def _coloured(status: str) -> Text:
    return Text(status, style={"passed": "green", "failed": "red"}.get(status, "yellow"))


def _detail(result: Result) -> RenderableType:
    text = "\n".join(filter(None, (result.subject, result.text, result.traceback)))
    return fields({f"{result.status} {result.check}": text})


def _by_pair(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Results by what a subject begins with: the plugin, or a pair."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.subject.partition(", ")[0], []).append(result)
    return found


def _json(reports: Sequence[Report]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "backends": [
            {
                "name": report.name,
                "environment": report.environment.to_json(),
                "status": report.status,
                "counts": {status: report.counts[status] for status in _STATUSES},
                "results": [attrs.asdict(result) for result in report.results],
            }
            for report in reports
        ],
    }


def _junit(reports: Sequence[Report]) -> bytes:
    root = ElementTree.Element("testsuites")
    for report in reports:
        counts = report.counts
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=report.name,
            tests=str(len(report.results)),
            failures=str(counts["failed"]),
            skipped=str(counts["not run"]),
            time=f"{sum(result.seconds for result in report.results):.3f}",
        )
        for result in report.results:
            attributes = {"classname": f"{report.name}.{result.check}", "name": result.subject}
            case = ElementTree.SubElement(suite, "testcase", attributes, time=f"{result.seconds:.3f}")
            if result.status != "passed":
                kind = "failure" if result.status == "failed" else "skipped"
                ElementTree.SubElement(case, kind, message=result.text).text = result.traceback
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document
