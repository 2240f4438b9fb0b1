"""`moe-core tune`: measure what fits a layer on this machine, and keep the times for the choice."""

from __future__ import annotations

import math
import os
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
from moe_core.cli.stopping import telling_when_stopped
from moe_core.cli.tune_view import TuneView
from moe_core.environment import Environment
from moe_core.errors import MoeCoreError, SpecError, UnknownNameError, UnwrittenError, counted
from moe_core.manager import BackendManager, default_manager
from moe_core.measurement_sources import older_file, older_file_problem, user_file
from moe_core.measurements import shape_key
from moe_core.planner import decide, keeps_weights, without_copies
from moe_core.request import LayerRequest

if TYPE_CHECKING:
    from moe_core.tuning.cache import Recorder
    from moe_core.tuning.deadline import Deadline
    from moe_core.tuning.search import Step

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
            min=0,
            metavar="MIN",
            help="End after about this time, set-up included; layers share it.",
            show_default="no limit",
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
        home = f"HOME is {os.environ['HOME']!r}" if "HOME" in os.environ else "HOME is not set"
        raise SpecError(f"there is no home folder for a cache ({home}): say --output FILE, or set XDG_CACHE_HOME")
    recorder = Recorder(target, machine, manager)
    if recorder.replaced:
        print_error(f"{recorder.replaced}; with the first new time it becomes {recorder.aside.name}", label="warning")
    elif output is None and (older := older_file(machine)):
        print_error(f"{older_file_problem(older)}; not used", label="warning")
    counts = sorted(set(tokens)) if tokens else _powers_of_two(machine.device_type)
    run = _Run(manager, machine, recorder, counts, repeats, seconds, of_model=model is not None)
    try:
        with telling_when_stopped(lambda what: stdout().print(f"{what}; {_kept(run, recorder)}", soft_wrap=True)):
            run.measure(requests, math.inf if minutes is None else 60 * minutes)
    except UnwrittenError as error:
        raise UnwrittenError(f"{error}; times of the last token count are only in the table") from error
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
    of_model: bool
    num_times: int = 0

    def measure(self, requests: Sequence[LayerRequest], limit: float) -> None:
        from moe_core.tuning.deadline import Deadline
        from moe_core.tuning.search import DeviceLostError

        end = Deadline.after(limit)
        with TuneView(self.machine, len(requests), self.counts, self.seconds, limit) as view:
            for index, request in enumerate(requests):
                # What a layer leaves of its share is for those behind it.
                deadline = Deadline.after(end.left / (len(requests) - index))
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

    def _measure(self, request: LayerRequest, deadline: Deadline, view: TuneView) -> None:
        from moe_core.tuning.deadline import TimeUpError
        from moe_core.tuning.search import LayerSearch

        keeps = keeps_weights(request, of_model=self.of_model)
        view.begin(request_line(request), keeps)
        search = LayerSearch(self.manager, request, self.machine, deadline=deadline, told=view.tell)
        shape = shape_key(search.request)
        view.candidates([candidate.full_name for candidate in search.candidates])
        try:
            for step in search.steps(self.counts, self.repeats, self.seconds):
                try:
                    self._keep(shape, step)
                finally:
                    # What cannot be written is in the table at least.
                    table = self.recorder.table(shape)
                    if keeps:
                        table = without_copies(self.manager, search.request, self.machine, table)
                    view.add(step, decide(self.manager, search.request, self.machine, table))
        except TimeUpError as error:
            view.stop(str(error))
        view.finish()

    def _keep(self, shape: str, step: Step) -> None:
        if step.times or step.wrong:
            was_shared = self.recorder.is_shared
            self.recorder.add(shape, step.num_tokens, step.times, step.wrong)
            self.num_times += len(step.times)
            if self.recorder.is_shared and not was_shared:
                others = f"another moe-core tune writes to {self.recorder.path}"
                print_error(
                    f"{others}: all times are kept, but those who measure at once slow each other down", "warning"
                )


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
