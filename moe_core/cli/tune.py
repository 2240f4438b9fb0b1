"""`moe-core tune`: measure what fits a layer on this machine, and keep the times for the choice."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from moe_core.cli.layer_options import (
    REPEATS,
    Activation,
    Bias,
    Dtype,
    HiddenSize,
    IntermediateSize,
    Model,
    NumExperts,
    QuantSchemes,
    Repeats,
    Shapes,
    TopK,
    TpSize,
    tokens_option,
)
from moe_core.cli.options import Device, Verbose, check_names
from moe_core.cli.output import print_error, stdout
from moe_core.cli.plan_view import request_line
from moe_core.cli.progress import stage
from moe_core.cli.requests import requested_groups, tell_assumed
from moe_core.cli.stopping import INTERRUPTED, exit_on_signals
from moe_core.cli.tune_view import TuneView
from moe_core.environment import Environment
from moe_core.errors import MoeCoreError, SpecError, UnknownNameError, UnwrittenError, counted
from moe_core.manager import BackendManager, default_manager
from moe_core.measurement_sources import user_file
from moe_core.measurements import shape_key
from moe_core.request import LayerRequest

if TYPE_CHECKING:
    from moe_core.tuning.cache import Recorder

#: Largest token count unless told otherwise; counts are the powers of two up to it.
MOST_TOKENS, MOST_TOKENS_ON_CPU = 8192, 1024


def tune(
    model: Model = None,
    shape: Shapes = None,
    num_experts: NumExperts = None,
    top_k: TopK = None,
    hidden_size: HiddenSize = None,
    intermediate_size: IntermediateSize = None,
    activation: Activation = None,
    bias: Bias = None,
    dtype: Dtype = None,
    quant_scheme: QuantSchemes = None,
    tp_size: TpSize = 1,
    tokens: Annotated[
        list[int] | None, tokens_option(f"powers of two to {MOST_TOKENS}, on a CPU to {MOST_TOKENS_ON_CPU}")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Do not measure this; may be repeated.")
    ] = None,
    device: Device = None,
    repeats: Repeats = REPEATS,
    seconds: Annotated[
        float, typer.Option(min=0, metavar="SEC", help="About how long to sample at one token count.")
    ] = 2.0,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="MIN", help="Stop after about this time; layers share it.", show_default="no limit"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the times go.", show_default="your cache")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Measure what fits a layer on this machine.

    That is every combination, at several token counts; one whose result is wrong beside the layer in fp32 has no time.
    Plans that are made afterwards rank by these times, and give ranges of token counts routes of their own where that
    pays. Everything that was measured is kept, also when the command is interrupted. Without sizes, shape and model,
    the layer is one of Qwen3-30B-A3B.
    """
    layer = {
        "num_experts": num_experts,
        "top_k": top_k,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "activation": activation,
        "bias": bias,
    }
    check_names(exclude=exclude or ())
    requests = _requests(model, shape or (), layer, dtype, quant_scheme or (), tp_size, exclude or ())
    manager = default_manager()
    with stage("importing torch"):
        machine = manager.probe(device)
        from moe_core.tuning.cache import Recorder

    target = output or user_file(machine)
    if output is None and not target.is_absolute():
        raise SpecError("there is no home folder for a cache: say --output FILE, or set XDG_CACHE_HOME")
    recorder = Recorder(target, machine, manager)
    if recorder.replaced:
        print_error(f"{recorder.replaced}; not kept", label="warning")
    counts = sorted(set(tokens)) if tokens else _powers_of_two(machine.device_type)
    run = _Run(manager, machine, recorder, counts, repeats, seconds)
    try:
        with exit_on_signals():
            run.measure(requests, None if minutes is None else 60 * minutes)
    except KeyboardInterrupt:
        stdout().print(f"interrupted; {_kept(run, recorder)}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    stdout().print(_kept(run, recorder), soft_wrap=True)
    if not run.num_times:
        raise typer.Exit(1)


def _kept(run: _Run, recorder: Recorder) -> str:
    if not run.num_times:
        return "nothing was measured"
    return f"{counted(run.num_times, 'time')} measured; {recorder.num_times} in {recorder.path}"


@attrs.define
class _Run:
    """One call of the command: layer after layer, each within its share of the time that is left."""

    manager: BackendManager
    machine: Environment
    recorder: Recorder
    counts: Sequence[int]
    repeats: int
    seconds: float
    num_times: int = 0

    def measure(self, requests: Sequence[LayerRequest], limit: float | None) -> None:
        from moe_core.tuning.search import DeviceLostError

        start = time.monotonic()
        with TuneView(self.machine, len(requests), self.counts, self.seconds, limit) as view:
            for index, request in enumerate(requests):
                left = None if limit is None else start + limit - time.monotonic()
                deadline = None if left is None else time.monotonic() + left / (len(requests) - index)
                try:
                    self._measure(request, deadline, view)
                except DeviceLostError as error:
                    view.skip(str(error))
                    return
                except (UnknownNameError, UnwrittenError):
                    # The next layer would end in the same way.
                    raise
                except MoeCoreError as error:
                    view.skip(f"{request_line(request)}: {error}")

    def _measure(self, request: LayerRequest, deadline: float | None, view: TuneView) -> None:
        from moe_core.tuning.search import LayerSearch

        view.begin(request_line(request))
        search = LayerSearch(self.manager, request, self.machine)
        view.candidates([candidate.full_name for candidate in search.candidates])
        steps = search.steps(self.counts, self.repeats, self.seconds)
        for count in self.counts:
            if deadline is not None and time.monotonic() > deadline:
                view.stop(f"time is up before T={count}")
                break
            step = next(steps)
            if step.times or step.wrong:
                self.recorder.add(shape_key(search.request), step.num_tokens, step.times, step.wrong)
                self.num_times += len(step.times)
            view.add(step)
        view.finish()


def _requests(
    model: Path | None,
    shapes: Sequence[str],
    layer: Mapping[str, object],
    dtype: str | None,
    schemes: Sequence[str],
    tp_size: int,
    exclude: Sequence[str],
) -> list[LayerRequest]:
    """The layers to measure, each once."""
    shared = {"tp_size": tp_size, "exclude": tuple(exclude), "dispatch_dtype": None}
    groups = list(requested_groups(shapes, model, layer, dtype, schemes, shared))
    tell_assumed(groups, schemes)
    return list(dict.fromkeys(group.request for _, group in groups))


def _powers_of_two(device: str) -> list[int]:
    most = MOST_TOKENS_ON_CPU if device == "cpu" else MOST_TOKENS
    return [1 << power for power in range(most.bit_length())]
