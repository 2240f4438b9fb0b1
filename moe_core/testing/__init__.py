"""The conformance kit: what a backend must do, as checks that run on what it declares.

`BackendConformance` is the class that a plugin's tests adopt; `Kit` lists the cases for any other runner; the single
`check_*` functions lie in `moe_core.testing.checks`. The reference that all of it compares with is in `reference`.
"""

from __future__ import annotations

from moe_core.testing.catalogue import CHECKS
from moe_core.testing.conformance import BackendConformance
from moe_core.testing.kit import Kit, run_checks
from moe_core.testing.outcome import Case, ConformanceError, NotRun, Result

__all__ = ["CHECKS", "BackendConformance", "Case", "ConformanceError", "Kit", "NotRun", "Result", "run_checks"]
