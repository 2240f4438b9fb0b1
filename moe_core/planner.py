"""From a decision to the finished plan: the select hooks, what they answered, and the checks on it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import attrs

from moe_core import dispatch_dtype
from moe_core.decision import Decision, DtypeChoice, Ranked, WorkloadDecision
from moe_core.environment import Environment
from moe_core.errors import ResolutionError
from moe_core.manager import BackendManager
from moe_core.measurements import MeasurementTable
from moe_core.plan import MoEPlan, Route
from moe_core.request import LayerRequest, Workload
from moe_core.resolver import describe_pins, resolve
from moe_core.specs import DeclaredRunner, answers_to


class PlanWarning(UserWarning):
    """The plan differs from what was asked for, as documented; the decision says how."""


def decide(
    manager: BackendManager,
    request: LayerRequest,
    environment: Environment,
    measurements: MeasurementTable | None = None,
) -> Decision:
    """Resolve one layer against the manager's plugins; a pinned plugin that failed to load raises its error."""
    for pin in (request.a2a_backend, request.runner_backend):
        failed = [failure.found.name for failure in manager.failures()]
        if pin is not None and pin.partition(":")[0] in failed and pin not in manager.names():
            manager.require(pin.partition(":")[0])
    return resolve(manager.specs(), request, environment, measurements, manager.reports())


def make_plan(
    manager: BackendManager,
    request: LayerRequest,
    environment: Environment,
    measurements: MeasurementTable | None = None,
) -> tuple[MoEPlan, Decision]:
    """The plan of one layer and the decision behind it.

    Raises:
        ResolutionError: Nothing fits, or a pin does not; the message lists reasons and hints, the exception
            carries the decision.
        PluginError: A select hook answered something that is no candidate.
        UnknownNameError: A pin, prefer or exclude names nothing.
    """
    decision = decide(manager, request, environment, measurements)
    if not decision.is_feasible:
        raise ResolutionError(_refusal(manager, decision), decision)
    workloads = _one_route(decision) if request.deterministic else list(decision.workloads)
    routes = tuple(_route(manager, request, workload) for workload in workloads)
    notes = [note for workload in workloads for note in (*workload.notes, *_adjustments(workload))]
    for note in dict.fromkeys(notes):
        if note.startswith(("fallback", "pinned")):
            warnings.warn(note, PlanWarning, stacklevel=2)
    plan = MoEPlan(
        request=request,
        routes=sorted(routes, key=lambda route: (route.max_tokens is None, route.max_tokens or 0)),
        weight_layout=str(decision.weight_layout),
        output_is_complete=request.tp_size == 1 and (request.ep_size == 1 or request.token_placement == "distributed"),
        notes=tuple(dict.fromkeys(notes)),
    )
    return plan, decision


def plan_layers(
    manager: BackendManager, requests: Mapping[str, LayerRequest], environment: Environment
) -> dict[str, MoEPlan]:
    """A plan per layer name; layers that ask for the same are resolved once.

    Raises:
        ResolutionError: As `make_plan`, with the layer's name in front.
    """
    plans: dict[LayerRequest, MoEPlan] = {}
    for name, request in requests.items():
        if request in plans:
            continue
        try:
            plans[request], _ = make_plan(manager, request, environment)
        except ResolutionError as error:
            raise ResolutionError(f"layer {name}: {error}", error.decision) from error
    return {name: plans[request] for name, request in requests.items()}


def _one_route(decision: Decision) -> list[WorkloadDecision]:
    """One decision for all workloads, so that a token's bits do not depend on the phase."""
    first, *others = decision.workloads
    shared = [
        entry for entry in first.ranked if all(entry.candidate in [r.candidate for r in w.ranked] for w in others)
    ]
    if not shared:
        raise ResolutionError("deterministic: the workloads have no combination in common", decision)
    limits = [workload.workload.max_tokens for workload in decision.workloads]
    most = None if None in limits else max(limit for limit in limits if limit is not None)
    phase = first.workload.phase if not others else "any"
    workload = Workload(
        phase=phase, max_tokens=most, graph_capture=any(w.workload.graph_capture for w in decision.workloads)
    )
    return [attrs.evolve(first, workload=workload, ranked=tuple(shared))]


def _route(manager: BackendManager, request: LayerRequest, decision: WorkloadDecision) -> Route:
    first = decision.ranked[0]
    # The user's own order is above every hook but a policy's.
    policy_only = first.because == "prefer" or first.because.startswith("measured")
    narrowed = attrs.evolve(request, workloads=(decision.workload,))
    candidates = [ranked.candidate for ranked in decision.ranked]
    candidate, selected_by = manager.select_dispatcher(narrowed, candidates, policy_only)
    chosen = decision.ranked[candidates.index(candidate)]
    dtype = chosen.dtype if request.dispatch_dtype else _asked_dtype(manager, narrowed, chosen, policy_only)
    return Route(
        phase=decision.workload.phase,
        max_tokens=decision.workload.max_tokens,
        dispatcher=candidate.dispatcher,
        runner=candidate.runner,
        token_dtype=dtype.token_dtype,
        dtype_rule=dtype.rule,
        dtype_requested=dtype.requested,
        row_alignment=_row_alignment(chosen),
        selected_by=selected_by,
        graph_capture=decision.workload.graph_capture,
    )


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


def _adjustments(decision: WorkloadDecision) -> tuple[str, ...]:
    first = decision.ranked[0].dtype
    return first.notes if first.requested else ()


def _refusal(manager: BackendManager, decision: Decision) -> str:
    """What was asked, what is missing, and what would run instead: one line per reason."""
    request, environment = decision.request, decision.environment
    machine = f"{environment.device_type} {environment.arch}".strip()
    title = f"no backend combination fits this layer on {machine}: {decision.error}"
    lines = [title, f"  asked: {request.quant}, {request.dtype}, {request.activation}, ep {request.ep_size}"]
    for workload in decision.workloads:
        if not workload.ranked:
            lines.append(f"  workload {workload.workload.phase}, {describe_pins(request, workload.workload)}:")
            lines += [f"    {line}" for line in _relevant_reasons(request, workload)]
    lines += [f"  plugin {plugin.name} {plugin.status}: {plugin.error}" for plugin in decision.plugins if plugin.error]
    lines.append(f"  would run without the pins: {_alternatives(manager, decision) or 'nothing'}")
    lines.append("  change what a line names, or say allow_fallback=True to let another combination serve")
    return "\n".join(lines)


def _relevant_reasons(request: LayerRequest, decision: WorkloadDecision) -> list[str]:
    """Reasons against what the pins mean; pairs that another pair of the same specs explains better are left out."""
    a2a = decision.workload.a2a_backend or request.a2a_backend
    lines = []
    for spec in decision.specs:
        pin = request.runner_backend if isinstance(spec.declared, DeclaredRunner) else a2a
        if pin is None or answers_to(pin, spec.declared):
            lines += [f"{spec.declared.full_name}: {reason}" for reason in spec.reasons]
    pinned = [pair for pair in decision.pairs if all(reason.code != "pin" for reason in pair.reasons)]
    joined = [pair for pair in pinned if all(reason.code != "format" for reason in pair.reasons)]
    for pair in joined or pinned or (() if lines else decision.pairs):
        lines += [f"{pair.candidate.full_name}: {reason}" for reason in pair.reasons]
    return lines


def _alternatives(manager: BackendManager, decision: Decision) -> str:
    free = attrs.evolve(decision.request, a2a_backend=None, runner_backend=None, dispatch_dtype=None)
    free = attrs.evolve(free, workloads=[attrs.evolve(w, a2a_backend=None) for w in free.workloads])
    resolved = resolve(manager.specs(), free, decision.environment)
    return ", ".join(dict.fromkeys(r.candidate.full_name for w in resolved.workloads for r in w.ranked))
