"""`moe-core bench`: whole layers on this machine, beside other implementations and the floor."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import attrs
import typer
from typer.core import TyperCommand

from moe_core.cli.bench_view import report_view, row_line
from moe_core.cli.layer_options import (
    REPEATS,
    Activation,
    Dtype,
    HiddenSize,
    IntermediateSize,
    Model,
    NumExperts,
    QuantSchemes,
    Repeats,
    Shapes,
    TopK,
    tokens_option,
)
from moe_core.cli.option_words import options_of
from moe_core.cli.options import AsJson, Device, Verbose, check_names, known_word
from moe_core.cli.output import print_error, print_json, stderr, stdout
from moe_core.cli.plan_view import group_title, sizes_line
from moe_core.cli.progress import doing, stage
from moe_core.cli.requests import requested_groups, tell_assumed
from moe_core.cli.stopping import telling_when_stopped
from moe_core.errors import SpecError, counted
from moe_core.manager import default_manager
from moe_core.model_config import LayerGroup
from moe_core.request import LayerRequest
from moe_core.whole_file import check_writable

if TYPE_CHECKING:
    from moe_core.bench.report import Report, Row

_TOKENS = (1, 16, 256)
#: Names of `moe_core.tuning.timing.CLOCKS`, which imports torch.
_CLOCKS = ("wall", "cpu")
#: What may stand beside `--read`.
_BESIDE_READ = ("read", "as_json", "plot", "verbose")
#: More than any machine has a use for; far more of them end the process.
_MOST_THREADS = 1024
#: Above every level of the log of torch's profiler, whose first start reads it: it tells of each start and stop.
_NO_LOG = "99"


def bench(
    context: typer.Context,
    model: Model = None,
    shape: Shapes = None,
    num_experts: NumExperts = None,
    top_k: TopK = None,
    hidden_size: HiddenSize = None,
    intermediate_size: IntermediateSize = None,
    activation: Activation = None,
    dtype: Dtype = None,
    quant_scheme: QuantSchemes = None,
    tokens: Annotated[list[int] | None, tokens_option(", ".join(map(str, _TOKENS)))] = None,
    combination: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also this one of ours: a runner, or 'dispatcher + runner', for example 'none.masked + torch'; names "
            "are those of list-backends; may be repeated.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Compare with this one alone ('transformers grouped_mm', ...), or with none; may be repeated.",
            show_default="all that are installed",
        ),
    ] = None,
    device: Device = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST_THREADS, metavar="N", help="Threads of torch.", show_default="torch's"),
    ] = None,
    clock: Annotated[
        str,
        typer.Option(metavar="NAME", help="For what no graph captures: wall, or cpu (one thread on a shared machine)."),
    ] = "wall",
    repeats: Repeats = REPEATS,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SEC",
            help="Take no more samples after this time, but five each.",
            show_default="no limit",
        ),
    ] = None,
    issue_time: Annotated[
        bool, typer.Option("--issue-time", help="At one token, also the host's time per call outside a graph.")
    ] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Also the most memory that a forward holds.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON, and again as more come.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a chart, for example chart.png; needs matplotlib.")
    ] = None,
    read: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure nothing: show, and draw, what --output wrote.")
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Time whole layers with random weights on this machine.

    What the resolver chooses runs beside every implementation of others that is installed, on the same inputs. Each
    result is first compared with the layer in fp32. Where there are graphs, what can be captured is captured. Without
    sizes, shape and model, the layer is one of Qwen3-30B-A3B. What was measured is shown, also when the command is
    interrupted. Exit code 1: a combination of moe-core's own is wrong, fails, or has no figure; that of others is
    theirs.
    """
    known_word("clock", clock, _CLOCKS)
    _check_files(output, plot)
    if "none" in (peer or ()) and len(set(peer or ())) > 1:
        raise typer.BadParameter("--peer none cannot be combined with other peers")
    if read is not None:
        _check_alone(context)
        from moe_core.bench.report import Report

        _show(Report.read(read), as_json, plot)
        return
    if memory:
        os.environ.setdefault("KINETO_LOG_LEVEL", _NO_LOG)
    sizes = {
        "num_experts": num_experts,
        "top_k": top_k,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "activation": activation,
    }
    measured = _Measured(output)
    with telling_when_stopped(lambda what: measured.tell(what, as_json, plot)):
        report = _measure(
            measured,
            layers=_layers(shape or (), model, sizes, dtype, quant_scheme or ()),
            combinations=combination or (),
            of_model=model is not None,
            peers=peer or (),
            device=device,
            threads=threads,
            tokens=tuple(tokens or _TOKENS),
            clock=clock,
            repeats=repeats,
            seconds=seconds,
            with_issue_time=issue_time,
            with_memory=memory,
        )
    _show(report, as_json, plot)
    failures = report.failures()
    for failure, counts in failures.items():
        print_error(f"{failure} (T = {', '.join(map(str, counts))})")
    if failures:
        raise typer.Exit(1)


def _check_alone(context: typer.Context) -> None:
    """What says how to measure has no meaning beside `--read`, and would be missed in what is shown."""
    options = options_of(cast(TyperCommand, context.command))
    given = [name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
    others = [options[name] for name in given if name not in _BESIDE_READ]
    if others:
        raise typer.BadParameter(f"--read measures nothing: {', '.join(others)} cannot be combined with it")


def _check_files(output: Path | None, plot: Path | None) -> None:
    """What would be lost after minutes of measuring is refused before."""
    for option, path in (("--output", output), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise SpecError(f"{option} {path}: folder {path.parent} does not exist")
        if path is not None:
            check_writable(path, option)
    if plot is not None:
        from moe_core.bench.plot import require_format

        require_format(plot)


def _layers(
    shapes: Sequence[str],
    model: Path | None,
    sizes: dict[str, Any],
    dtype: str | None,
    schemes: Sequence[str],
) -> tuple[tuple[str, LayerRequest], ...]:
    """Names and requests: every layer in every scheme."""
    groups = list(requested_groups(shapes, model, sizes, dtype, schemes, {"dispatch_dtype": None}))
    tell_assumed(groups, schemes)
    return tuple(dict.fromkeys((_name(shape, group, model), group.request) for shape, group in groups))


def _name(shape: str, group: LayerGroup, model: Path | None) -> str:
    sizes = sizes_line(group.request)
    title = shape or ("" if model is None else group_title(group))
    return f"{title} ({sizes})" if title else sizes


@attrs.define
class _Measured:
    """What is measured so far: told and written as it comes.

    Attributes:
        output: File that is written again and again, None for none.
        total: How many rows there will be.
        keep: Takes a line for each of them.
        done: How many are finished.
        report: All of them, and those that are being timed.
    """

    output: Path | None
    total: int = 0
    keep: Callable[[str], None] = print
    done: int = 0
    report: Report | None = None

    def add(self, report: Report, finished: Sequence[Row]) -> None:
        """Take the report so far, and its rows that were finished since the last one."""
        self.report = report
        for row in finished:
            self.done += 1
            if row.timing is not None or row.went_wrong:
                self.keep(f"{self.done}/{self.total} {row_line(row)}")
        if finished and self.output is not None:
            report.write(self.output)

    def tell(self, what: str, as_json: bool, plot: Path | None) -> None:
        """Show and write what there is, when `what` ended the command."""
        rows = self.report.rows if self.report else ()
        count = sum(row.timing is not None for row in rows)
        if self.report is None or not count:
            stderr().print(f"{what}; nothing was measured", soft_wrap=True)
            return
        where = ""
        if self.output is not None:
            # First: where it would be shown there may be nobody any more.
            self.report.write(self.output)
            where = f", in {self.output}"
        _show(self.report, as_json, plot)
        stderr().print(f"{what}; what was measured until then: {counted(count, 'figure')}{where}", soft_wrap=True)


def _measure(
    measured: _Measured,
    *,
    layers: tuple[tuple[str, LayerRequest], ...],
    combinations: Sequence[str],
    of_model: bool,
    peers: Sequence[str],
    device: str | None,
    threads: int | None,
    **options: Any,
) -> Report:
    """Measure; says on stderr how far it is."""
    with stage("importing torch"):
        import torch

        from moe_core.bench.contenders import Combination
        from moe_core.bench.peers import find_peers
        from moe_core.bench.run import Sweep, run

    environment = default_manager().probe(device)
    ours = tuple(Combination(pins, of_model) for pins in dict.fromkeys([None, *combinations]))
    for combination in ours:
        check_names(**combination.fields)
    if threads is not None:
        torch.set_num_threads(threads)
    with doing() as steps:
        sweep = Sweep(
            layers=layers,
            combinations=ours,
            peers=() if set(peers) == {"none"} else find_peers(peers, environment.device_type),
            environment=environment,
            told=steps.begin,
            **options,
        )
        measured.keep, measured.total = steps.keep, sweep.num_rows
        report = run(sweep, measured.add)
    if measured.output is not None:
        report.write(measured.output)
    return report


def _show(report: Report, as_json: bool, plot: Path | None) -> None:
    if as_json:
        print_json(report.to_json())
    else:
        stdout().print(report_view(report))
    if plot is not None:
        from moe_core.bench.plot import write_plot

        write_plot(report, plot)
