"""Runners that take the place of another of their plugin, and what a decision says about one that does."""

from __future__ import annotations

from moe_core.declared import Candidate, DeclaredRunner
from moe_core.findings import WorkloadDecision


def notes_with(decision: WorkloadDecision, chosen: Candidate) -> tuple[str, ...]:
    """The notes of a workload if this candidate runs: only what stands in and runs is worth a note.

    Args:
        decision: The workload, with a note about the first candidate already or without.
        chosen: One of its candidates; a hook need not choose the first.
    """
    about_first = _note(decision, decision.ranked[0].candidate.runner)
    about_chosen = _note(decision, chosen.runner)
    others = (note for note in decision.notes if note != about_first)
    return (*others, about_chosen) if about_chosen else (*others,)


def _note(decision: WorkloadDecision, runner: DeclaredRunner) -> str:
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
