"""`moe-core bench`: whole layers on this machine, beside other implementations and the floor."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_core.cli.bench_view import report_view
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
from moe_core.cli.options import AsJson, Device, Verbose, check_names, known_word
from moe_core.cli.output import print_error, print_json, stdout
from moe_core.cli.plan_view import group_title, sizes_line
from moe_core.cli.progress import doing, stage
from moe_core.cli.requests import requested_groups, tell_assumed
from moe_core.errors import SpecError
from moe_core.manager import default_manager
from moe_core.model_config import LayerGroup
from moe_core.request import LayerRequest
from moe_core.whole_file import check_writable

if TYPE_CHECKING:
    from moe_core.bench.report import Report

_TOKENS = (1, 16, 256)
#: Names of `moe_core.tuning.timing.CLOCKS`, which imports torch.
_CLOCKS = ("wall", "cpu")
#: More than any machine has a use for; far more of them end the process.
_MOST_THREADS = 1024
#: Above every level of the log of torch's profiler, whose first start reads it: it tells of each start and stop.
_NO_LOG = "99"


def bench(
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
    sizes, shape and model, the layer is one of Qwen3-30B-A3B. Exit code 1: a combination of moe-core's own is wrong,
    fails, or has no figure; that of others is theirs.
    """
    known_word("clock", clock, _CLOCKS)
    _check_files(output, plot)
    if "none" in (peer or ()) and len(set(peer or ())) > 1:
        raise typer.BadParameter("--peer none cannot be combined with other peers")
    if read is not None:
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
    report = _measured(
        layers=_layers(shape or (), model, sizes, dtype, quant_scheme or ()),
        combinations=combination or (),
        peers=peer or (),
        device=device,
        threads=threads,
        output=output,
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
    if shape:
        return f"{shape} ({sizes})"
    return sizes if model is None else group_title(group)


def _measured(
    *,
    layers: tuple[tuple[str, LayerRequest], ...],
    combinations: Sequence[str],
    peers: Sequence[str],
    device: str | None,
    threads: int | None,
    output: Path | None,
    **options: Any,
) -> Report:
    """Measure; says on stderr how far it is."""
    with stage("importing torch"):
        import torch

        from moe_core.bench.contenders import Combination
        from moe_core.bench.peers import find_peers
        from moe_core.bench.run import Sweep, run

    environment = default_manager().probe(device)
    named = tuple(map(Combination, dict.fromkeys(combinations)))
    for combination in named:
        check_names(**combination.fields)
    if threads is not None:
        torch.set_num_threads(threads)
    with doing() as steps:
        sweep = Sweep(
            layers=layers,
            combinations=(Combination(), *named),
            peers=() if set(peers) == {"none"} else find_peers(peers, environment.device_type),
            environment=environment,
            told=steps.begin,
            **options,
        )
        report = run(sweep, _shown(len(layers) * len(set(sweep.tokens)), output, steps.keep))
    if output is not None:
        report.write(output)
    return report


def _shown(total: int, output: Path | None, keep: Callable[[str], None]) -> Callable[[Report], None]:
    """What takes the report of what is done: writes it, and tells `keep` which of `total` numbers of tokens are new."""
    done: set[tuple[str, str, int]] = set()

    def shown(report: Report) -> None:
        if output is not None:
            report.write(output)
        new = {(row.layer, row.scheme, row.num_tokens) for row in report.rows} - done
        done.update(new)
        for layer, scheme, num_tokens in sorted(new):
            keep(f"{len(done)}/{total} {layer}, {scheme}, T = {num_tokens}")

    return shown


def _show(report: Report, as_json: bool, plot: Path | None) -> None:
    if as_json:
        print_json(report.to_json())
    else:
        stdout().print(report_view(report))
    if plot is not None:
        from moe_core.bench.plot import write_plot

        write_plot(report, plot)
