"""The resolver's answer for one layer, as value, as data for programs and as text."""

from __future__ import annotations

from typing import Any

import attrs

from moe_core.explanation import explanation_lines
from moe_core.findings import Findings, WorkloadDecision


@attrs.frozen(kw_only=True)
class Decision(Findings):
    """The resolver's whole answer for one layer; its fields are those of `Findings`."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for programs."""
        return {
            "schema": 1,
            "feasible": self.is_feasible,
            "error": self.error,
            "weight_layout": self.weight_layout,
            "reasons": [attrs.asdict(reason) for reason in self.reasons],
            "request": attrs.asdict(self.request),
            "environment": self.environment.to_json(),
            "plugins": [attrs.asdict(plugin) for plugin in self.plugins],
            "measurements": list(self.measurements),
            "workloads": [_workload_json(workload) for workload in self.workloads],
        }

    def explain(self, *, full: bool = False) -> str:
        """As plain text what runs, why, what else fits in order, and what does not, folded.

        Args:
            full: Instead of folding, every spec and then every pair with each reason against it.
        """
        return "\n".join(explanation_lines(self, full=full))


def _workload_json(decision: WorkloadDecision) -> dict[str, Any]:
    return {
        "workload": attrs.asdict(decision.workload),
        "min_tokens": decision.min_tokens,
        "specs": [
            {"name": spec.declared.full_name, "reasons": [attrs.asdict(reason) for reason in spec.reasons]}
            for spec in decision.specs
        ],
        "pairs": [
            {
                "name": pair.candidate.full_name,
                "token_dtypes": [str(dtype) for dtype in pair.token_dtypes],
                "reasons": [attrs.asdict(reason) for reason in pair.reasons],
            }
            for pair in decision.pairs
        ],
        "ranked": [
            {
                "name": ranked.candidate.full_name,
                "because": ranked.because,
                "preferred": list(ranked.preferred),
                "microseconds": ranked.microseconds,
                "dispatch_dtype": str(ranked.dtype.token_dtype),
                "dtype_rule": ranked.dtype.rule,
                "dtype_requested": ranked.dtype.requested,
                "dtype_notes": list(ranked.dtype.notes),
            }
            for ranked in decision.ranked
        ],
        "not_told_apart": [entry.candidate.full_name for entry in decision.not_told_apart],
        "unshared": [candidate.full_name for candidate in decision.unshared],
        "outranked_by": decision.outranked_by,
        "fallback": decision.fallback,
        "notes": list(decision.notes),
    }
