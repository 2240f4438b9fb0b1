"""From a decision to the finished plan: the select hooks, what they answered, and the checks on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import attrs

from moe_core import dispatch_dtype
from moe_core.decision import Decision
from moe_core.environment import Environment
from moe_core.errors import MoeCoreError, ResolutionError, UnknownNameError
from moe_core.explanation import refusal
from moe_core.findings import DtypeChoice, Ranked, WorkloadDecision
from moe_core.manager import BackendManager
from moe_core.measurement_sources import default_measurements
from moe_core.measurements import MeasurementTable
from moe_core.plan import MoEPlan, Route
from moe_core.quant import WHOLE
from moe_core.ranking import is_users_order
from moe_core.request import LayerRequest, Pins, Workload
from moe_core.resolver import resolve
from moe_core.stand_ins import notes_with
from moe_core.vocabulary import ANY, CANONICAL


class PlanWarning(UserWarning):
    """The plan differs from what was asked for, as documented; the decision says how."""


def decide(
    manager: BackendManager,
    request: LayerRequest,
    environment: Environment,
    measurements: MeasurementTable | None = None,
) -> Decision:
    """Resolve one layer against the manager's plugins; naming a plugin that failed to load raises its error.

    Without a table the measured times are those of `default_measurements`; an empty table stands for none.
    """
    if measurements is None:
        measurements = default_measurements(environment, manager.versions())
    try:
        return resolve(manager.specs(), request, environment, measurements, manager.reports())
    except UnknownNameError as error:
        plugin = error.name.partition(":")[0]
        if any(failed.found.name == plugin for failed in manager.failures()):
            manager.require(plugin)
        raise


def make_plan(
    manager: BackendManager,
    request: LayerRequest,
    environment: Environment,
    measurements: MeasurementTable | None = None,
) -> tuple[MoEPlan, Decision]:
    """The plan of one layer and the decision behind it.

    Args:
        manager: The plugins.
        request: The layer.
        environment: The machine.
        measurements: Measured times that rank and split; default: the user's and those that ship with the package.

    Raises:
        ResolutionError: Nothing fits, or a pin does not; the message lists reasons and hints, the exception
            carries the decision.
        PluginError: A select hook answered something that is no candidate, or a named plugin failed to load.
        UnknownNameError: A pin, prefer or exclude names nothing.
    """
    plan, decision, deviations = _plan(manager, request, environment, measurements)
    for text in deviations:
        warnings.warn(text, PlanWarning, stacklevel=2)
    return plan, decision


def keeps_weights(request: LayerRequest, *, of_model: bool) -> bool:
    """Whether a layer is of a model that keeps its weights: those of floats are served where transformers has them."""
    return of_model and not request.quant.is_quantized


def without_copies(
    manager: BackendManager,
    request: LayerRequest,
    environment: Environment,
    measurements: MeasurementTable | None = None,
) -> MeasurementTable:
    """The measured times for a layer of a model that keeps its weights, as transformers does with those of floats.

    Times of runners that would copy weights into a layout of their own do not count where the order without times reads
    them as they lie: the model would hold them twice. Arguments are those of `make_plan`.
    """
    if measurements is None:
        measurements = default_measurements(environment, manager.versions())
    if decide(manager, request, environment, MeasurementTable()).weight_layout != CANONICAL:
        return measurements
    copying = (
        f"{plugin.name}:{runner.short_name}"
        for plugin in manager.specs()
        for runner in plugin.runners
        if runner.weight_layout != CANONICAL
    )
    return measurements.without(
        copying, "whose weights would be a copy beside those that the model keeps; a pin takes it"
    )


def plan_layers(
    manager: BackendManager,
    requests: Mapping[str, LayerRequest],
    environment: Environment,
    measurements: MeasurementTable | None = None,
) -> dict[str, MoEPlan]:
    """A plan per layer name; layers that ask for the same are resolved once.

    Raises:
        ResolutionError: As `make_plan`, with the layer's name in front; other errors carry it as a note.
    """
    if measurements is None:
        measurements = default_measurements(environment, manager.versions())
    plans: dict[str, MoEPlan] = {}
    of_request: dict[LayerRequest, MoEPlan] = {}
    for name, request in requests.items():
        if (known := of_request.get(request)) is not None:
            plans[name] = known
            continue
        try:
            plans[name], _, deviations = _plan(manager, request, environment, measurements)
        except ResolutionError as error:
            raise ResolutionError(f"layer {name}: {error}", error.decision) from error
        except MoeCoreError as error:
            error.add_note(f"while planning layer {name}")
            raise
        for text in deviations:
            warnings.warn(f"layer {name}: {text}", PlanWarning, stacklevel=2)
        of_request[request] = plans[name]
    return plans


def _plan(
    manager: BackendManager, request: LayerRequest, environment: Environment, measurements: MeasurementTable | None
) -> tuple[MoEPlan, Decision, tuple[str, ...]]:
    """The plan, its decision, and how it deviates from what was asked for."""
    decision = decide(manager, request, environment, measurements)
    if not decision.is_feasible:
        raise ResolutionError(refusal(decision, _alternatives(manager, decision)), decision)
    routes: list[Route] = []
    deviations: list[str] = []
    notes: list[str] = []
    for workload in _merged(decision) if request.deterministic else decision.workloads:
        route, dtype = _route(manager, request, workload)
        routes.append(route)
        deviations += [workload.fallback, *(dtype.notes if dtype.requested else ())]
        notes += notes_with(workload, route.candidate, request, environment)
    deviations = [text for text in dict.fromkeys(deviations) if text]
    plan = MoEPlan(
        request=request,
        routes=sorted(
            _joined(routes), key=lambda route: (route.max_tokens is None, route.max_tokens or 0, route.phase)
        ),
        weight_layout=str(decision.weight_layout),
        output_is_complete=request.tp_size == 1 and (request.ep_size == 1 or request.token_placement == "distributed"),
        notes=tuple(dict.fromkeys([*deviations, *notes, *_short_groups(request)])),
    )
    return plan, decision, tuple(deviations)


def _short_groups(request: LayerRequest) -> Iterator[str]:
    """Groups of input channels that end in a shorter one, which runners compute and only some tools write."""
    for name, scheme, size in (
        ("w13", request.quant.w13, "hidden_size"),
        ("w2", request.quant.w2, "intermediate_size"),
    ):
        rows, group = scheme.weight_block if isinstance(scheme.weight_block, tuple) else (WHOLE, WHOLE)
        channels = getattr(request, size)
        # Tiles of several rows are cut off at the end of a matrix everywhere.
        if rows == 1 and group != WHOLE and channels % group:
            yield (
                f"groups of {group} input channels do not divide {size} {channels}, so the last of {name} has "
                f"{channels % group}; most tools write no such weights: is the size of groups right?"
            )


def _joined(routes: list[Route]) -> list[Route]:
    """Neighbouring routes of one phase that a hook made equal are one."""
    joined: list[Route] = []
    for route in routes:
        if joined and attrs.evolve(joined[-1], max_tokens=route.max_tokens) == route:
            joined.pop()
        joined.append(route)
    return joined


def _merged(decision: Decision) -> list[WorkloadDecision]:
    """One decision for all workloads, so that a token's bits do not depend on the phase."""
    first, *others = decision.workloads
    if not others:
        return [first]
    asked = [each.workload for each in decision.workloads]
    limits = [workload.max_tokens for workload in asked]
    workload = Workload(
        phase=ANY,
        max_tokens=None if None in limits else max(limit for limit in limits if limit is not None),
        graph_capture=any(workload.graph_capture for workload in asked),
        down_gemm_overlap=any(workload.down_gemm_overlap for workload in asked),
    )
    fallback = "; ".join(dict.fromkeys(w.fallback for w in decision.workloads if w.fallback))
    notes = tuple(note for workload in decision.workloads for note in workload.notes)
    return [attrs.evolve(first, workload=workload, fallback=fallback, notes=notes)]


def _route(manager: BackendManager, request: LayerRequest, decision: WorkloadDecision) -> tuple[Route, DtypeChoice]:
    # The user's own order is above every hook but a policy's.
    policy_only = is_users_order(decision.ranked)
    alone = (decision.workload,)
    narrowed = request if request.workloads == alone else attrs.evolve(request, workloads=alone)
    candidates = [ranked.candidate for ranked in decision.ranked]
    candidate, selected_by = manager.select_dispatcher(narrowed, candidates, policy_only)
    chosen = decision.ranked[candidates.index(candidate)]
    # So is the dtype that the user named, be it by the deprecated variable.
    is_users = chosen.dtype.rule in ("pin", "variable")
    dtype = chosen.dtype if is_users else _asked_dtype(manager, narrowed, chosen, policy_only)
    workload = decision.workload
    # A workload that does not say how many tokens it has still may not exceed what the backends take.
    limits = [limit for limit in (workload.max_tokens, candidate.declared_max_tokens) if limit is not None]
    route = Route(
        phase=workload.phase,
        max_tokens=min(limits, default=None),
        dispatcher=candidate.dispatcher,
        runner=candidate.runner,
        token_dtype=dtype.token_dtype,
        dtype_rule=dtype.rule,
        dtype_requested=dtype.requested,
        row_alignment=_row_alignment(chosen),
        selected_by=selected_by,
        graph_capture=workload.graph_capture,
        down_gemm_overlap=workload.down_gemm_overlap,
    )
    return route, dtype


def _asked_dtype(manager: BackendManager, request: LayerRequest, ranked: Ranked, policy_only: bool) -> DtypeChoice:
    candidate = ranked.candidate
    dispatcher = candidate.dispatcher.spec if candidate.dispatcher else None
    options = dispatch_dtype.candidates(request, dispatcher, candidate.runner.spec)
    first = ranked.dtype.token_dtype
    options = (first, *(token for token in options if token != first))
    answer = manager.select_output_dtype(request, candidate, options, policy_only)
    if answer is None or answer[0] == first:
        return ranked.dtype
    return DtypeChoice(token_dtype=answer[0], rule=f"hook:{answer[1]}")


def _row_alignment(ranked: Ranked) -> int:
    dispatcher = ranked.candidate.dispatcher
    return (dispatcher.spec.row_alignment if dispatcher else 0) or ranked.candidate.runner.spec.row_alignment


def _alternatives(manager: BackendManager, decision: Decision) -> list[str]:
    """What would run if nothing were pinned, best first."""
    request = decision.request
    if all(request.pins(workload.workload) == Pins() for workload in decision.workloads):
        return []
    free = attrs.evolve(request, a2a_backend=None, runner_backend=None, dispatch_dtype=None)
    free = attrs.evolve(free, workloads=[attrs.evolve(w, a2a_backend=None) for w in free.workloads])
    resolved = resolve(manager.specs(), free, decision.environment)
    return list(dict.fromkeys(r.candidate.full_name for w in resolved.workloads for r in w.ranked))
