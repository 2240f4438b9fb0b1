"""`moe-core resolve`: which combination a layer or a model would get, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from moe_core.cli.explain_view import explain_view
from moe_core.cli.layer_options import (
    Activation,
    Bias,
    Dtype,
    HiddenSize,
    IntermediateSize,
    Model,
    NumExperts,
    QuantScheme,
    Shapes,
    TopK,
    TpSize,
)
from moe_core.cli.option_words import speller
from moe_core.cli.options import A2aBackend, AsJson, MachineName, RunnerBackend, check_machine, known_word
from moe_core.cli.output import print_error, print_json, stdout
from moe_core.cli.plan_view import group_title, machine_view, plan_view
from moe_core.cli.requests import assumed, requested_groups, workloads
from moe_core.decision import Decision
from moe_core.environment import Environment, load_environment
from moe_core.errors import ResolutionError
from moe_core.manager import BackendManager, default_manager
from moe_core.measurement_sources import explicit_measurements
from moe_core.measurements import MeasurementTable
from moe_core.model_config import LayerGroup
from moe_core.plan import MoEPlan, Route
from moe_core.planner import keeps_weights, make_plan, without_copies
from moe_core.vocabulary import PHASES, TOKEN_DTYPES, TOKEN_PLACEMENTS

SCHEMA = 1


@attrs.frozen(kw_only=True)
class Resolved:
    """One group of equal layers with its plan, or the error why it has none.

    Attributes:
        name: Of the known shape; "" for layers of a model or by sizes.
        group: The layers.
        decision: What was considered.
        plan: None where nothing fits.
        assumed: What nobody asked for, as `requests.assumed` says it; "" where there is nothing of the kind.
        error: Why there is no plan, "" where there is one.
    """

    name: str
    group: LayerGroup
    decision: Decision
    plan: MoEPlan | None
    assumed: str
    error: str = ""

    @property
    def title(self) -> str:
        """`layers 0-3`, `layer of deepseek-v3`."""
        return f"{group_title(self.group)} of {self.name}" if self.name else group_title(self.group)


def resolve(
    context: typer.Context,
    model: Model = None,
    shape: Shapes = None,
    num_experts: NumExperts = None,
    top_k: TopK = None,
    hidden_size: HiddenSize = None,
    intermediate_size: IntermediateSize = None,
    activation: Activation = None,
    bias: Bias = None,
    dtype: Dtype = None,
    quant_scheme: QuantScheme = None,
    ep_size: Annotated[int, typer.Option(metavar="N", help="Expert-parallel ranks.")] = 1,
    tp_size: TpSize = 1,
    token_placement: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"Where tokens lie under expert parallelism: {', '.join(TOKEN_PLACEMENTS)}."),
    ] = "distributed",
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PHASE[:MAX][:graph]",
            help=f"A kind of forward ({', '.join(PHASES)}), its most tokens per rank, and whether it is captured "
            "into a device graph; may be repeated.",
        ),
    ] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Ask for repeatable bits.")] = False,
    environment: MachineName = None,
    a2a_backend: A2aBackend = None,
    runner_backend: RunnerBackend = None,
    dispatch_dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Pin the dispatch dtype: {', '.join(TOKEN_DTYPES)}."),
    ] = None,
    prefer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Rank this plugin, dispatcher or runner first; may be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Never use this plugin, dispatcher or runner; may be repeated."),
    ] = None,
    allow_fallback: Annotated[
        bool,
        typer.Option("--allow-fallback", help="Let another combination replace a pinned one."),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Refuse adjustments of a pinned dispatch dtype."),
    ] = False,
    measurements: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rank by the measured times of this file of moe-core tune alone.",
            show_default="your cache, then the tables that ship",
        ),
    ] = None,
    no_measurements: Annotated[bool, typer.Option("--no-measurements", help="Rank without measured times.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add why, what else fits, and what is against the rest.")
    ] = False,
    as_json: AsJson = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="With --explain every reason; and the traceback of an error."),
    ] = False,
) -> None:
    """Choose the backends of a layer or of a model, and say why.

    For a model, that is every MoE layer, draft layers included. Without sizes, shape and model, the layer is one of
    Qwen3-30B-A3B.
    """
    layer = {
        "num_experts": num_experts,
        "top_k": top_k,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "activation": activation,
        "bias": bias,
    }
    shared = {
        "ep_size": ep_size,
        "tp_size": tp_size,
        "token_placement": known_word("token placement", token_placement, TOKEN_PLACEMENTS),
        "workloads": workloads(workload or ()),
        "deterministic": deterministic,
        "a2a_backend": a2a_backend,
        "runner_backend": runner_backend,
        "dispatch_dtype": dispatch_dtype,
        "prefer": prefer or (),
        "exclude": exclude or (),
        "allow_fallback": allow_fallback,
        "strict": strict,
    }
    schemes = () if quant_scheme is None else (quant_scheme,)
    groups = list(requested_groups(shape or (), model, layer, dtype, schemes, shared))
    manager = default_manager()
    machine = manager.probe() if environment is None else load_environment(environment)
    check_machine(manager, machine)
    table = _measurements(measurements, no_measurements, machine)
    of_model = model is not None
    results = [_resolved(name, group, manager, machine, table, schemes, of_model) for name, group in groups]
    spelled = speller(context)
    if as_json:
        _print_json(results)
    else:
        _print(results, spelled, explain=explain, full=verbose)
    _exit_if_refused(results, spelled)


def _measurements(file: Path | None, none: bool, machine: Environment) -> MeasurementTable | None:
    if file is not None and none:
        raise typer.BadParameter("--measurements cannot be combined with --no-measurements")
    if none:
        return MeasurementTable()
    return None if file is None else explicit_measurements(file, machine)


def _resolved(
    name: str,
    group: LayerGroup,
    manager: BackendManager,
    machine: Environment,
    measurements: MeasurementTable | None,
    schemes: Sequence[str],
    of_model: bool,
) -> Resolved:
    taken = assumed(name, group.request, schemes)
    if keeps_weights(group.request, of_model=of_model):
        measurements = without_copies(manager, group.request, machine, measurements)
    try:
        plan, decision = make_plan(manager, group.request, machine, measurements)
    except ResolutionError as error:
        if error.decision is None:
            raise
        return Resolved(name=name, group=group, decision=error.decision, plan=None, assumed=taken, error=str(error))
    return Resolved(name=name, group=group, decision=decision, plan=plan, assumed=taken)


def _print_json(results: list[Resolved]) -> None:
    print_json(
        {
            "schema": SCHEMA,
            "feasible": all(result.plan for result in results),
            "groups": [_json(result) for result in results],
        }
    )


def _print(results: list[Resolved], spelled: Callable[[str], str], *, explain: bool, full: bool) -> None:
    """What runs first, then why."""
    console = stdout()
    if explain or any(result.plan for result in results):
        console.print(machine_view(results[0].decision))
    for result in results:
        if result.plan:
            console.print(plan_view(result.title, result.plan, result.decision, spelled, result.assumed))
        if explain:
            console.print(explain_view(result.title, result.decision, spelled, full=full))


def _exit_if_refused(results: list[Resolved], spelled: Callable[[str], str]) -> None:
    """Say every error once, and raise `typer.Exit` if there is any."""
    errors = dict.fromkeys(result.error for result in results if result.error)
    for message in errors:
        print_error(spelled(message))
    if errors:
        raise typer.Exit(1)


def _json(result: Resolved) -> dict[str, Any]:
    return {
        "shape": result.name,
        "layers": list(result.group.layers),
        "draft": result.group.draft,
        "assumed": result.assumed,
        "plan": None if result.plan is None else _plan_json(result.plan),
        "decision": result.decision.to_json(),
        "error": result.error,
    }


def _plan_json(plan: MoEPlan) -> dict[str, Any]:
    return {
        "routes": [_route_json(route) for route in plan.routes],
        "weight_layout": plan.weight_layout,
        "output_is_complete": plan.output_is_complete,
        "notes": list(plan.notes),
    }


def _route_json(route: Route) -> dict[str, Any]:
    return {
        "phase": route.phase,
        "max_tokens": route.max_tokens,
        "dispatcher": route.dispatcher.full_name if route.dispatcher else None,
        "runner": route.runner.full_name,
        "dispatch_dtype": str(route.token_dtype),
        "dtype_rule": route.dtype_rule,
        "dtype_requested": route.dtype_requested,
        "row_alignment": route.row_alignment,
        "selected_by": route.selected_by,
    }
