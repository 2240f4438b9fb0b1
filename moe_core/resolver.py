"""The pure choice: (specs, request, environment, measurements) -> `Decision`. Imports no torch, reads no globals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from moe_core import dispatch_dtype
from moe_core.decision import (
    Decision,
    DtypeChoice,
    PairReport,
    PluginReport,
    Ranked,
    Reason,
    SpecReport,
    WorkloadDecision,
)
from moe_core.environment import Environment
from moe_core.errors import UnknownNameError
from moe_core.feasibility import pair_reasons, spec_reasons
from moe_core.measurements import MeasurementTable
from moe_core.ranking import rank
from moe_core.request import LayerRequest, Workload
from moe_core.specs import Candidate, DeclaredDispatcher, DeclaredRunner, PluginSpec, Requirement, answers_to

_Declared = DeclaredDispatcher | DeclaredRunner


def resolve(
    plugins: Iterable[PluginSpec],
    request: LayerRequest,
    environment: Environment,
    measurements: MeasurementTable | None = None,
    reports: Sequence[PluginReport] = (),
) -> Decision:
    """Decide one layer.

    Args:
        plugins: Declarations of the plugins that are ready; their order does not matter.
        request: The layer.
        environment: The machine it is for, which need not be this one.
        measurements: Measured times, if there are any.
        reports: How discovery went, failed plugins included; kept in the decision.

    Returns:
        The decision; `is_feasible` tells whether a plan can be made of it.

    Raises:
        UnknownNameError: A pin, prefer or exclude names nothing that is declared.
    """
    declared = _declared(plugins)
    _check_names(declared, request, reports)
    table = measurements or MeasurementTable()
    pinned = [_decide(declared, request, workload, environment, table, pins=True) for workload in request.workloads]
    workloads = [
        _with_fallback(decision, declared, request, environment, table) if request.allow_fallback else decision
        for decision in pinned
    ]
    layout, error = _shared_layout(workloads)
    workloads = [_only_layout(decision, layout) for decision in workloads] if layout else workloads
    return Decision(
        request=request,
        environment=environment,
        plugins=tuple(reports),
        workloads=tuple(workloads),
        weight_layout=layout,
        error=error,
    )


def _declared(plugins: Iterable[PluginSpec]) -> list[tuple[_Declared, tuple[Requirement, ...]]]:
    found: list[tuple[_Declared, tuple[Requirement, ...]]] = []
    for plugin in sorted(plugins, key=lambda plugin: plugin.name):
        for dispatcher in sorted(plugin.dispatchers, key=lambda spec: spec.short_name):
            found.append((DeclaredDispatcher(plugin.name, dispatcher), plugin.requirements))
        for runner in sorted(plugin.runners, key=lambda spec: spec.short_name):
            found.append((DeclaredRunner(plugin.name, runner), plugin.requirements))
    return found


def _check_names(
    declared: list[tuple[_Declared, tuple[Requirement, ...]]], request: LayerRequest, reports: Sequence[PluginReport]
) -> None:
    """A name that means nothing is an error, not a preference that never applies."""
    dispatchers = [d for d, _ in declared if isinstance(d, DeclaredDispatcher)]
    runners = [d for d, _ in declared if isinstance(d, DeclaredRunner)]
    a2a_names = {d.spec.name for d in dispatchers} | {d.spec.a2a for d in runners if d.spec.a2a}
    for pin in {request.a2a_backend, *(workload.a2a_backend for workload in request.workloads)} - {None}:
        if pin not in a2a_names and not any(answers_to(str(pin), d) for d in dispatchers):
            fits = _joins(dispatchers, runners, request.runner_backend)
            raise UnknownNameError("a2a backend", str(pin), a2a_names, hint=f"{fits}{_failed_hint(reports)}")
    if request.runner_backend is not None and not any(answers_to(request.runner_backend, d) for d in runners):
        names = {d.spec.name for d in runners}
        raise UnknownNameError("runner backend", request.runner_backend, names, hint=_failed_hint(reports))
    everything = {d.plugin for d, _ in declared} | {d.spec.name for d, _ in declared} | {r.name for r in reports}
    for name in (*request.prefer, *request.exclude):
        if name not in everything and not any(answers_to(name, d) for d, _ in declared):
            raise UnknownNameError("backend", name, everything)


def _joins(dispatchers: list[DeclaredDispatcher], runners: list[DeclaredRunner], pin: str | None) -> str:
    formats = {runner.spec.format for runner in runners if pin is not None and answers_to(pin, runner)}
    fitting = sorted({d.spec.short_name for d in dispatchers if d.spec.format in formats})
    return f"Runner {pin!r} can be joined to: {', '.join(fitting) or 'nothing'}. " if pin is not None else ""


def _failed_hint(reports: Sequence[PluginReport]) -> str:
    failed = [f"{report.name} ({report.error.splitlines()[-1]})" for report in reports if report.error]
    return f"Plugins that failed to load: {'; '.join(failed)}." if failed else ""


def _decide(
    declared: list[tuple[_Declared, tuple[Requirement, ...]]],
    request: LayerRequest,
    workload: Workload,
    environment: Environment,
    measurements: MeasurementTable,
    pins: bool,
) -> WorkloadDecision:
    specs = tuple(
        SpecReport(declared=d, reasons=spec_reasons(d, requirements, request, workload, environment))
        for d, requirements in declared
    )
    passed = [report.declared for report in specs if not report.reasons]
    reports, feasible = [], {}
    for candidate in _pairs(passed):
        report, dtype = _report_pair(candidate, request, workload, environment, pins)
        reports.append(report)
        if dtype is not None:
            feasible[candidate] = dtype
    ranked = rank(feasible, request, workload, environment, measurements)
    return WorkloadDecision(workload=workload, specs=specs, pairs=tuple(reports), ranked=ranked)


def _pairs(passed: list[_Declared]) -> list[Candidate]:
    runners = [d for d in passed if isinstance(d, DeclaredRunner)]
    dispatchers = [d for d in passed if isinstance(d, DeclaredDispatcher)]
    fused = [Candidate(None, runner) for runner in runners if runner.spec.format == "fused"]
    return fused + [Candidate(d, r) for d in dispatchers for r in runners if r.spec.format != "fused"]


def _report_pair(
    candidate: Candidate, request: LayerRequest, workload: Workload, environment: Environment, pins: bool
) -> tuple[PairReport, DtypeChoice | None]:
    dispatcher = candidate.dispatcher.spec if candidate.dispatcher else None
    reasons = list(pair_reasons(candidate, request))
    if pins:
        reasons += _pin_reasons(candidate, request, workload)
    dtype: DtypeChoice | Reason | None = None
    # Tokens of another format have no dtype to compare.
    if not any(reason.code == "format" for reason in reasons):
        pin = request.dispatch_dtype if pins else None
        dtype = dispatch_dtype.choose(request, environment.device_type, dispatcher, candidate.runner.spec, pin)
        if isinstance(dtype, Reason):
            reasons.append(dtype)
    options = dispatch_dtype.candidates(request, dispatcher, candidate.runner.spec)
    report = PairReport(candidate=candidate, reasons=tuple(reasons), token_dtypes=options)
    return report, dtype if isinstance(dtype, DtypeChoice) and not reasons else None


def _pin_reasons(candidate: Candidate, request: LayerRequest, workload: Workload) -> list[Reason]:
    reasons = []
    a2a = workload.a2a_backend or request.a2a_backend
    is_a2a = a2a is None or a2a == candidate.a2a_backend
    if not is_a2a and not (candidate.dispatcher and answers_to(str(a2a), candidate.dispatcher)):
        reasons.append(Reason("pin", f"a2a backend {a2a}", candidate.a2a_backend))
    if request.runner_backend is not None and not answers_to(request.runner_backend, candidate.runner):
        reasons.append(Reason("pin", f"runner backend {request.runner_backend}", candidate.runner.spec.name))
    return reasons


def _with_fallback(
    decision: WorkloadDecision,
    declared: list[tuple[_Declared, tuple[Requirement, ...]]],
    request: LayerRequest,
    environment: Environment,
    measurements: MeasurementTable,
) -> WorkloadDecision:
    """The same workload without pins if the pins left nothing; said in the notes, never silent."""
    if decision.ranked:
        return decision
    free = _decide(declared, request, decision.workload, environment, measurements, pins=False)
    if not free.ranked:
        return decision
    note = f"fallback: the pinned combination ({describe_pins(request, decision.workload)}) cannot run here"
    return attrs.evolve(free, notes=(*free.notes, note))


def describe_pins(request: LayerRequest, workload: Workload) -> str:
    """`a2a deepep, runner deep_gemm, dispatch dtype fp8`, or `no pins`."""
    pins = {
        "a2a": workload.a2a_backend or request.a2a_backend,
        "runner": request.runner_backend,
        "dispatch dtype": request.dispatch_dtype,
    }
    return ", ".join(f"{kind} {name}" for kind, name in pins.items() if name) or "no pins"


def _shared_layout(workloads: Sequence[WorkloadDecision]) -> tuple[str | None, str]:
    """The weight layout that serves every workload with the best places, or why none does."""
    empty = [decision.workload for decision in workloads if not decision.ranked]
    if empty:
        return None, f"nothing fits workload {', '.join(workload.phase for workload in empty)}"
    places = [_places(decision.ranked) for decision in workloads]
    shared = set.intersection(*(set(place) for place in places))
    if not shared:
        listed = "; ".join(
            f"{d.workload.phase}: {', '.join(place)}" for d, place in zip(workloads, places, strict=True)
        )
        return None, f"weight-layout: the workloads have no weight layout in common ({listed})"
    return min(shared, key=lambda layout: (tuple(place[layout] for place in places), layout)), ""


def _places(ranked: tuple[Ranked, ...]) -> dict[str, int]:
    places: dict[str, int] = {}
    for place, entry in enumerate(ranked):
        places.setdefault(entry.candidate.runner.spec.weight_layout, place)
    return places


def _only_layout(decision: WorkloadDecision, layout: str) -> WorkloadDecision:
    kept = tuple(r for r in decision.ranked if r.candidate.runner.spec.weight_layout == layout)
    dropped = [r.candidate.full_name for r in decision.ranked if r not in kept]
    note = f"weight-layout {layout} serves all workloads; not used: {', '.join(dropped)}"
    return attrs.evolve(decision, ranked=kept, notes=(*decision.notes, note) if dropped else decision.notes)
