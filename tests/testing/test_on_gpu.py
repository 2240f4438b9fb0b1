"""What only a GPU shows: the captured forwards of the built-in backends."""

from __future__ import annotations

import pytest
import torch

from moe_core.testing import Kit
from moe_core.testing.outcome import PASSED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_captured_forwards(name: str) -> None:
    kit = Kit(f"moe_core.backends.{name}.plugin", quick=True)
    results = [case.run() for case in kit.cases() if case.check == "graph_capture"]
    assert results
    assert [result for result in results if result.status != PASSED] == []
