"""Jobs on real processes of one group: those of the conformance kit, under the name that tests import."""

from __future__ import annotations

from moe_core.testing.ranks import COLLECTIVE_SECONDS, TIMEOUT_SECONDS, RankError, run_on_ranks

__all__ = ["COLLECTIVE_SECONDS", "TIMEOUT_SECONDS", "RankError", "run_on_ranks"]
