"""`moe-core bench`: whole layers on this machine, beside other implementations and the floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from moe_core.cli.bench_view import report_view
from moe_core.cli.options import Verbose, known_word
from moe_core.cli.output import print_json, stderr, stdout
from moe_core.cli.plan_view import group_title
from moe_core.cli.requests import ACTIVATIONS, requested_groups
from moe_core.environment import probe_environment
from moe_core.errors import SpecError
from moe_core.manager import default_manager
from moe_core.quant import SCHEMES
from moe_core.request import LayerRequest
from moe_core.tuning.shapes import SHAPES
from moe_core.vocabulary import FLOAT_DTYPES

if TYPE_CHECKING:
    from moe_core.bench.report import Report

_TOKENS = (1, 16, 256)


def bench(
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Sizes of a known model: {', '.join(SHAPES)}; may be repeated."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR|FILE", help="Take the layers from this model's config.json; weights are random."),
    ] = None,
    num_experts: Annotated[int | None, typer.Option(help="Experts of the layer.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts per token.")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Size of a token, H.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="I of one expert.")] = None,
    activation: Annotated[str | None, typer.Option(help=f"One of {', '.join(ACTIVATIONS)}.")] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of tokens; may be repeated.", show_default=", ".join(map(str, _TOKENS))),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Dtype of the layer: {', '.join(FLOAT_DTYPES)}.", show_default="the model's, or bf16"),
    ] = None,
    quant_scheme: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Scheme of the weights: {', '.join(SCHEMES)}; may be repeated.",
            show_default="the model's, or unquantized",
        ),
    ] = None,
    combination: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also this one of ours: a runner, or 'dispatcher + runner', as list-backends names them.",
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
    device: Annotated[
        str | None, typer.Option(help="Device type, for example cpu or cuda.", show_default="the accelerator, else cpu")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.", show_default="torch's")] = None,
    clock: Annotated[
        str, typer.Option(help="For what no graph captures: wall, or cpu (one thread on a shared machine).")
    ] = "wall",
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 15,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Take no more samples after this time, but three each.", show_default="no limit"),
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the tables.")] = False,
    verbose: Verbose = False,
) -> None:
    """Time whole layers with random weights on this machine.

    What the resolver chooses runs beside every implementation of others that is installed, on the same inputs. Each
    result is first compared with the layer in fp32. Where there are graphs, what can be captured is captured. Without
    sizes and without a model, the layer is one of Qwen3-30B-A3B.
    """
    _check_files(output, plot)
    if read is not None:
        from moe_core.bench.report import Report

        _show(Report.read(read), as_json, plot)
        return
    sizes = {
        "num_experts": num_experts,
        "top_k": top_k,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "activation": activation,
    }
    report = _measured(
        layers=_layers(shape or (), model, sizes, dtype, quant_scheme or (None,)),
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


def _check_files(output: Path | None, plot: Path | None) -> None:
    """What would be lost after minutes of measuring is refused before."""
    for option, path in (("--output", output), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise SpecError(f"{option} {path}: folder {path.parent} does not exist")
    if plot is not None:
        from moe_core.bench.plot import require_matplotlib

        require_matplotlib()


def _layers(
    shapes: Sequence[str],
    model: Path | None,
    sizes: dict[str, Any],
    dtype: str | None,
    schemes: Sequence[str | None],
) -> tuple[tuple[str, LayerRequest], ...]:
    """Names of sizes and requests: every layer in every scheme."""
    for name in shapes:
        known_word("shape", name, SHAPES)
    given = [name for name in ("num_experts", "top_k", "hidden_size", "intermediate_size") if sizes[name] is not None]
    if shapes and (model is not None or given):
        raise typer.BadParameter("--shape cannot be combined with --model or with sizes")
    layers: list[tuple[str, dict[str, Any]]] = [
        (f"{name} ({SHAPES[name]})", {**sizes, **attrs.asdict(SHAPES[name])}) for name in shapes
    ]
    found = [
        (label or group_title(group) if model else label or _sizes_of(group.request), group.request)
        for label, fields in layers or [("", sizes)]
        for scheme in schemes
        for group in requested_groups(model, fields, dtype, scheme, {"dispatch_dtype": None})
    ]
    return tuple(dict.fromkeys(found))


def _sizes_of(request: LayerRequest) -> str:
    return f"{request.num_experts} experts, top-{request.top_k}, H {request.hidden_size}, I {request.intermediate_size}"


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
    import torch

    from moe_core.bench.contenders import Combination
    from moe_core.bench.peers import find_peers
    from moe_core.bench.run import Sweep, run

    manager = default_manager()
    environment = probe_environment(manager.modules_required(), device, manager.generations())
    if threads is not None:
        torch.set_num_threads(threads)
    sweep = Sweep(
        layers=layers,
        combinations=(Combination(), *map(Combination, combinations)),
        peers=() if list(peers) == ["none"] else find_peers(peers, environment.device_type),
        environment=environment,
        **options,
    )
    console, total = stderr(), len(layers) * len(set(sweep.tokens))
    done: set[tuple[str, str, int]] = set()

    def shown(report: Report) -> None:
        if output is not None:
            report.write(output)
        new = {(row.layer, row.scheme, row.num_tokens) for row in report.rows} - done
        done.update(new)
        for layer, scheme, num_tokens in sorted(new):
            line = f"{len(done)}/{total} {layer}, {scheme}, T = {num_tokens}"
            console.print(line, style="dim", soft_wrap=True)

    report = run(sweep, shown)
    if output is not None:
        report.write(output)
    return report


def _show(report: Report, as_json: bool, plot: Path | None) -> None:
    if as_json:
        print_json(report.to_json())
    else:
        stdout().print(report_view(report))
    if plot is not None:
        from moe_core.bench.plot import write_plot

        write_plot(report, plot)
