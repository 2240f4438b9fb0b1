"""What only a GPU shows: the torch backend's captured forwards, and a wrong one."""

from __future__ import annotations

import pytest
import torch

from moe_core.testing import Kit
from moe_core.testing.outcome import PASSED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_captured_forwards_of_the_torch_backend() -> None:
    kit = Kit("moe_core.backends.torch.plugin", quick=True)
    results = [case.run() for case in kit.cases() if case.check == "graph_capture"]
    assert results
    assert [result for result in results if result.status != PASSED] == []
