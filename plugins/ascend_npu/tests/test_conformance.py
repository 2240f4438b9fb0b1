"""Every check of the conformance kit on every cell of the plugin that needs one rank, on the emulated operators."""

from __future__ import annotations

import pytest
from ascend_layers import A2, A3

from moe_core.testing import BackendConformance, Case, Kit


class TestConformance(BackendConformance):
    plugin = "moe_plugin_ascend.plugin"
    environment = A3
    device = "cpu"


def _of_a2() -> list[Case]:
    """What A2 has of its own: its modes of `deepep` between ranks; and that its experts give the answer, each once."""
    cases = Kit("moe_plugin_ascend.plugin", environment=A2, device="cpu", quick=True).cases()
    between = [case for case in cases if case.check == "distributed_ranks" and "deepep.a2_" in case.subject]
    alone = {
        case.subject.partition(",")[0]: case
        for case in reversed(cases)
        if case.check == "answer" and "none.contiguous" in case.subject
    }
    return [*between, *alone.values()]


@pytest.mark.parametrize("case", _of_a2(), ids=str)
def test_on_a2(case: Case) -> None:
    result = case.run()
    assert result.status == "passed", result.text
