"""`moe-core verify`: the conformance kit for installed backends, on this machine or a described one."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moe_core.cli.backend_status import why_none
from moe_core.cli.options import AsJson, Device, MachineName, check_machine
from moe_core.cli.output import print_error, print_json, stderr, stdout
from moe_core.cli.progress import Lines, stage
from moe_core.cli.stopping import exit_on_signals
from moe_core.cli.verify_report import Report, pair_of, summary_of, to_json, to_junit, view
from moe_core.environment import Environment, load_environment
from moe_core.errors import MoeCoreError, SpecError, counted
from moe_core.manager import BackendManager, default_manager
from moe_core.whole_file import check_writable, write_whole

if TYPE_CHECKING:
    from moe_core.testing.outcome import Result

#: Each of them holds a torch.
_MOST_JOBS = 256


def verify(
    backends: Annotated[
        list[str] | None,
        typer.Argument(metavar="BACKEND", help="Plugins to check.", show_default="all installed ones"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Vary scheme, activation and dtype one at a time, not all with all.")
    ] = False,
    device: Device = None,
    environment: MachineName = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            max=_MOST_JOBS,
            metavar="N",
            help="Processes on a CPU.",
            show_default="one for each core",
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit XML report for a CI system.")
    ] = None,
    as_json: AsJson = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Add every result in full, and show the traceback of an error."),
    ] = False,
) -> None:
    """Check that installed backends do what they declare.

    Every declared combination of dispatcher, runner, scheme, activation and dtype is compared with a float64 layer.
    What cannot run on this machine is reported as not run, with the reason. Exit code 1: a check failed, or a named
    backend could not run at all.
    """
    if junit is not None and not junit.absolute().parent.is_dir():
        raise SpecError(f"--junit {junit}: folder {junit.parent} does not exist")
    if junit is not None:
        check_writable(junit, "--junit")
    manager = default_manager()
    names = backends or [spec.name for spec in manager.specs() if spec.dispatchers or spec.runners]
    if not names and not manager.failures():
        raise MoeCoreError(why_none())
    for name in names:
        manager.require(name)
    machine = None if environment is None else load_environment(environment)
    if machine is not None:
        check_machine(manager, machine)
    # Killed, it would leave the processes that it has started.
    with exit_on_signals():
        reports = [_run(manager, name, quick, machine, device, jobs) for name in dict.fromkeys(names)]
    if junit is not None:
        write_whole(junit, to_junit(reports).decode())
    if as_json:
        print_json(to_json(reports))
    else:
        stdout().print(Group(*(view(report, verbose) for report in reports)))
    unusable = [] if backends else [failed.found.name for failed in manager.failures()]
    if unusable:
        print_error(f"plugins that could not be loaded: {', '.join(unusable)}; see moe-core list-backends -v")
    bad = {"failed", "not run"} if backends else {"failed"}
    if unusable or any(report.status in bad for report in reports):
        raise typer.Exit(1)


def _run(
    manager: BackendManager, name: str, quick: bool, machine: Environment | None, device: str | None, jobs: int | None
) -> Report:
    """All cases of one backend; says on stderr how far it is."""
    start = time.perf_counter()
    with stage(f"reading what {name} declares"):
        from moe_core.testing.kit import Kit
        from moe_core.testing.parallel import run_cases

        module: Any = manager.found(name).load()
        kit = Kit(module, environment=machine, device=device, quick=quick)
        total = len(kit.cases())
    stderr().print(f"{name}: {counted(total, 'check')}", style="dim", soft_wrap=True)
    with closing(run_cases(kit, jobs or len(os.sched_getaffinity(0)))) as results:
        found = tuple(_shown(name, results, total))
    return Report(name, kit.backend.environment, found, time.perf_counter() - start)


def _shown(name: str, results: Iterator[Result], total: int) -> Iterator[Result]:
    """The results as they come, with a bar (on a terminal) and a line for the plugin and for each pair when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, count, failed = stderr(), 0, 0
    lines = Lines(console, name, "checks")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        start = time.perf_counter()
        for pair, of_pair in itertools.groupby(results, pair_of):
            done = []
            for result in of_pair:
                done.append(result)
                count += 1
                failed += result.status == "failed"
                note = f", [red]{failed} failed[/red]" if failed else ""
                progress.update(task, advance=1, description=f"{name}: {result.check}{note}")
                if not console.is_terminal:
                    lines.tell(count, total)
                yield result
            now = time.perf_counter()
            console.print(f"{pair}: {summary_of(done)}, {now - start:.1f} s", style="dim", soft_wrap=True)
            start = now
