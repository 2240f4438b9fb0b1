"""The pure choice: (specs, request, environment, measurements) -> `Decision`. Imports no torch, reads no globals."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import attrs

from moe_core import dispatch_dtype
from moe_core.decision import Decision
from moe_core.declared import Candidate, DeclaredDispatcher, DeclaredRunner, DeclaredSpec
from moe_core.described import check_described
from moe_core.environment import Environment
from moe_core.errors import PluginConflictError, counted
from moe_core.feasibility import Case, machine_reasons, pair_reasons, pin_reasons, report_spec
from moe_core.findings import DtypeChoice, PairReport, PluginReport, Reason, WorkloadDecision
from moe_core.measurements import MeasurementTable
from moe_core.misses import Misses, relevant
from moe_core.names import check_names
from moe_core.ranking import rank
from moe_core.request import LayerRequest, Pins, Workload
from moe_core.sharing import in_step
from moe_core.specs import DispatcherSpec, PluginSpec, RunnerSpec
from moe_core.stand_ins import notes_with
from moe_core.token_ranges import lanes_of, ranges_of

#: A spec, and what is against it on a machine whatever the layer.
_OnMachine: TypeAlias = tuple[DeclaredSpec, tuple[Reason, ...]]
#: Pins in the order in which a fallback drops them: as few as will do, numerics before transport.
_DROPPED_FIRST = ("dispatch_dtype", "runner", "a2a")
#: Most reasons that a fallback names; the decision has all.
_FEW_REASONS = 3


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
        PluginConflictError: Two declarations have one name.
        SpecError: The machine was described, with a device type or generation that nobody knows.
    """
    plugins = tuple(plugins)
    check_described(environment, plugins)
    declared = _on_machine(plugins, environment)
    check_names([d for d, _ in declared], request, reports)
    table = measurements or MeasurementTable()
    workloads = [_decide(declared, request, workload, environment, table) for workload in request.workloads]
    workloads = [attrs.evolve(w, min_tokens=_min_tokens(w.workload, request.workloads)) for w in workloads]
    layout, reason, error = None, None, ""
    empty = [decision.phase for decision in workloads if not decision.ranked]
    if empty:
        error = f"nothing fits workload {', '.join(empty)}"
    else:
        workloads, reason = _in_ranges(request, workloads, environment, table)
        layout = None if reason else workloads[0].ranked[0].candidate.runner.spec.weight_layout
    workloads = [_with_stand_in(decision, request, environment) for decision in workloads]
    return Decision(
        request=request,
        environment=environment,
        plugins=tuple(reports),
        workloads=tuple(workloads),
        weight_layout=layout,
        measurements=table.about(request, environment),
        reasons=(reason,) if reason else (),
        error=str(reason) if reason else error,
    )


def _with_stand_in(decision: WorkloadDecision, request: LayerRequest, environment: Environment) -> WorkloadDecision:
    """With a note if the first candidate takes the place of one that this layer is refused."""
    if not decision.ranked:
        return decision
    notes = notes_with(decision, decision.ranked[0].candidate, request, environment)
    return attrs.evolve(decision, notes=notes)


def _in_ranges(
    request: LayerRequest, workloads: list[WorkloadDecision], environment: Environment, table: MeasurementTable
) -> tuple[list[WorkloadDecision], Reason | None]:
    """What all workloads can share, and then a decision for each range of token counts that has its own winner."""
    lanes = [lanes_of(decision, request, environment, table) for decision in workloads]
    narrowed, reason = in_step(request, [lane for group in lanes for lane in group])
    if reason:
        return workloads, reason
    rest = iter(narrowed)
    groups = (list(itertools.islice(rest, len(group))) for group in lanes)
    return [part for group in groups for part in ranges_of(group)], None


# What layers share is found once for all of them: every layer of a model is resolved by itself.
@functools.lru_cache(maxsize=16)
def _on_machine(plugins: tuple[PluginSpec, ...], environment: Environment) -> tuple[_OnMachine, ...]:
    """All specs by plugin and name, each with what is against it on this machine."""
    ordered = sorted(plugins, key=lambda plugin: plugin.name)
    for plugin, following in itertools.pairwise(ordered):
        if following.name == plugin.name:
            raise PluginConflictError(f"two declarations are called {plugin.name!r}; neither may win: rename one")
    found: list[_OnMachine] = []
    for plugin in ordered:
        declared: list[DeclaredSpec] = [
            *(DeclaredDispatcher(plugin.name, spec) for spec in sorted(plugin.dispatchers, key=_short_name)),
            *(DeclaredRunner(plugin.name, spec) for spec in sorted(plugin.runners, key=_short_name)),
        ]
        found += [(each, machine_reasons(each.spec, plugin.requirements, environment)) for each in declared]
    return tuple(found)


def _short_name(spec: DispatcherSpec | RunnerSpec) -> str:
    return spec.short_name


def _decide(
    declared: Sequence[_OnMachine],
    request: LayerRequest,
    workload: Workload,
    environment: Environment,
    measurements: MeasurementTable,
) -> WorkloadDecision:
    """Both stages of one workload; with fewer pins where a fallback is allowed and nothing fits with all of them."""
    case = Case(request, workload, environment)
    specs = tuple(report_spec(each, of_machine, case) for each, of_machine in declared)
    rows = measurements.of_layer(request, environment)
    candidates = _candidates([report.declared for report in specs if not report.is_refused])

    def with_pins(pins: Pins) -> WorkloadDecision:
        pairs = [_report_pair(candidate, request, environment, pins) for candidate in candidates]
        feasible = [(report.candidate, dtype) for report, dtype in pairs if dtype is not None]
        ranked = rank(feasible, request, workload.phase, workload.max_tokens, rows)
        reports = tuple(report for report, _ in pairs)
        return WorkloadDecision(workload=workload, specs=specs, pairs=reports, ranked=ranked)

    pins = request.pins(workload)
    decision = with_pins(pins)
    if decision.ranked or not request.allow_fallback:
        return decision
    for fewer in _fewer_pins(pins):
        relaxed = with_pins(fewer)
        if relaxed.ranked:
            because = _what_is_against(request, pins, decision)
            return attrs.evolve(relaxed, fallback=f"fallback: asked for {pins}, kept {fewer}, because {because}")
    return decision


def _what_is_against(request: LayerRequest, pins: Pins, decision: WorkloadDecision) -> str:
    """The first reasons why nothing fits with all pins, and how many more there are."""
    misses = Misses.of(request, [relevant(pins, decision)]).nearest
    first = [miss.texts[0] for miss in misses][:_FEW_REASONS]
    left = sum(len(miss.texts) for miss in misses) - len(first)
    against = "; ".join([*first, *([f"and {counted(left, 'more reason')}"] if left else [])])
    return against or "nothing that was pinned can run here"


def _min_tokens(workload: Workload, workloads: Sequence[Workload]) -> int:
    """The smaller workloads of its phase take the counts below."""
    limit = math.inf if workload.max_tokens is None else workload.max_tokens
    same = (other.max_tokens for other in workloads if other.phase == workload.phase)
    return 1 + max((other for other in same if other is not None and other < limit), default=0)


def _fewer_pins(pins: Pins) -> Iterator[Pins]:
    given = [field for field in _DROPPED_FIRST if getattr(pins, field) is not None]
    for count in range(1, len(given) + 1):
        yield from (pins.dropped(*fields) for fields in itertools.combinations(given, count))


def _candidates(passed: list[DeclaredSpec]) -> list[Candidate]:
    runners = [d for d in passed if isinstance(d, DeclaredRunner)]
    dispatchers = [d for d in passed if isinstance(d, DeclaredDispatcher)]
    fused = [Candidate(None, runner) for runner in runners if runner.spec.format == "fused"]
    return fused + [Candidate(d, r) for d in dispatchers for r in runners if r.spec.format != "fused"]


def _report_pair(
    candidate: Candidate, request: LayerRequest, environment: Environment, pins: Pins
) -> tuple[PairReport, DtypeChoice | None]:
    """What is against a pair, and the dtype in which tokens would travel; None where anything is."""
    dispatcher, runner = candidate.dispatcher.spec if candidate.dispatcher else None, candidate.runner.spec
    reasons = pair_reasons(candidate, request) + pin_reasons(candidate, pins)
    # Tokens of another format have no dtype to compare.
    if not candidate.has_one_format:
        return PairReport(candidate=candidate, reasons=reasons), None
    options = dispatch_dtype.candidates(request, dispatcher, runner)
    dtype = dispatch_dtype.choose(request, environment.device_type, dispatcher, runner, pins.dispatch_dtype)
    if isinstance(dtype, Reason):
        return PairReport(candidate=candidate, reasons=(*reasons, dtype), token_dtypes=options), None
    report = PairReport(candidate=candidate, reasons=reasons, token_dtypes=options)
    return report, None if reasons else dtype
