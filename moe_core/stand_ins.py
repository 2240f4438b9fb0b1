"""Runners that take the place of others, and what a decision says about one that does.

Either of another of its plugin, as it declares, or, being for any device, of those that are made for this one.
"""

from __future__ import annotations

from moe_core.declared import Candidate, DeclaredRunner
from moe_core.environment import Environment
from moe_core.feasibility import nearest_schemes
from moe_core.findings import Reason, SpecReport, WorkloadDecision
from moe_core.request import LayerRequest
from moe_core.specs import RunnerSpec
from moe_core.vocabulary import ANY, TIERS

#: Reasons that follow from the layer: on another layer, or another split of it, the kernel would run here.
_OF_LAYER = ("scheme", "activation", "dtype", "bias", "weighting", "post-norm", "limit")


def notes_with(
    decision: WorkloadDecision, chosen: Candidate, request: LayerRequest, environment: Environment
) -> tuple[str, ...]:
    """The notes of a workload if this candidate runs: only what stands in and runs is worth a note.

    Args:
        decision: The workload, with notes about the first candidate already or without.
        chosen: One of its candidates; a hook need not choose the first.
        request: The layer.
        environment: The machine.
    """

    def about(runner: DeclaredRunner) -> list[str]:
        is_pinned = request.pins(decision.workload).runner is not None
        found = (
            _declared(decision, runner),
            "" if is_pinned else _for_any_device(decision, runner, request, environment),
        )
        return [note for note in found if note]

    of_first = about(decision.ranked[0].candidate.runner)
    return (*(note for note in decision.notes if note not in of_first), *about(chosen.runner))


def _declared(decision: WorkloadDecision, runner: DeclaredRunner) -> str:
    """`acme:acme.plain stands in for acme.tiled: needs hidden_size multiple_of 32, found hidden_size 100`, or ""."""
    if runner.spec.stands_in_for is None:
        return ""
    usual = (runner.plugin, runner.spec.stands_in_for)
    runners = (report for report in decision.specs if isinstance(report.declared, DeclaredRunner))
    against = next((r.reasons for r in runners if (r.declared.plugin, r.declared.spec.short_name) == usual), ())
    # Whoever excluded it knows.
    reasons = [reason for reason in against if reason.code != "excluded"]
    if not reasons:
        return ""
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    why = f"needs {reasons[0].needs}, found {reasons[0].found}{more}"
    return f"{runner.full_name} stands in for {runner.spec.stands_in_for}: {why}"


def _for_any_device(
    decision: WorkloadDecision, runner: DeclaredRunner, request: LayerRequest, environment: Environment
) -> str:
    """`torch:torch.standard is for any device and may be slow: what is for npu a2 needs bf16, found int8`, or ""."""
    if ANY not in runner.spec.devices:
        return ""
    made_for_it = _made_for(environment, TIERS.index(runner.spec.tier), decision)
    if not all(report.is_refused for _, report in made_for_it):
        return ""
    against = [
        (spec, report.reasons)
        for spec, report in made_for_it
        if all(reason.code in _OF_LAYER for reason in report.reasons)
    ]
    if not against:
        return ""
    needs, found = _what_is_lacking(against, request)
    machine = f"{environment.device_type} {environment.arch}".strip()
    slow = f"{runner.full_name} is for any device and may be slow"
    return f"{slow}: what is for {machine} needs {needs}, found {found}"


def _made_for(
    environment: Environment, least_tier: int, decision: WorkloadDecision
) -> list[tuple[RunnerSpec, SpecReport]]:
    """Runners of such a tier or a higher one that name the machine's device type, and what was found about each."""
    return [
        (report.declared.spec, report)
        for report in decision.specs
        if isinstance(report.declared, DeclaredRunner)
        and environment.device_type in report.declared.spec.devices
        and TIERS.index(report.declared.spec.tier) >= least_tier
    ]


def _what_is_lacking(against: list[tuple[RunnerSpec, tuple[Reason, ...]]], request: LayerRequest) -> tuple[str, str]:
    """What refused runners need, of what the nearest of them lacks first, and what was found."""
    # That one is nearest which reads the weights, and then which lacks the fewest.
    _, reasons = min(against, key=lambda each: (any(reason.code == "scheme" for reason in each[1]), len(each[1])))
    first = reasons[0]
    if first.code == "scheme":
        schemes = dict.fromkeys(scheme for spec, _ in against for scheme in spec.schemes)
        return nearest_schemes(tuple(schemes), request.local_quant), first.found
    alike = [
        reason.needs
        for _, reasons in against
        for reason in reasons
        if (reason.code, reason.field) == (first.code, first.field)
    ]
    return " or ".join(dict.fromkeys(alike)), first.found
