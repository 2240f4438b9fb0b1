"""What preparation holds in memory beside its source and its result, counted allocation by allocation."""

from __future__ import annotations

import pytest
import torch
from moe_plugin_ascend import plugin

from moe_core.backends.torch import plugin as torch_plugin
from moe_core.environment import PRESETS
from moe_core.manager import BackendManager
from moe_core.payloads import RawWeights
from moe_core.planner import make_plan
from moe_core.quant import BF16, W8A8_INT8, QuantScheme
from moe_core.request import LayerRequest
from moe_core.testing.allocations import Allocations
from moe_core.testing.stored import draw_layer

pytestmark = pytest.mark.usefixtures("emulation")
EXPERTS = 16


@pytest.mark.parametrize("gives_back", [True, False])
@pytest.mark.parametrize("scheme", [BF16, W8A8_INT8], ids=str)
def test_at_most_one_expert_of_extra_memory(scheme: QuantScheme, gives_back: bool) -> None:
    manager = BackendManager()
    manager.register("torch", torch_plugin)
    manager.register("ascend_npu", plugin)
    request = LayerRequest(
        num_experts=EXPERTS, top_k=2, hidden_size=448, intermediate_size=128, quant=scheme, a2a_backend="none"
    )
    plan, _ = make_plan(manager, request, PRESETS["ascend-a3"])
    tensors = draw_layer(request).raw(request.local_experts(0), "cpu").tensors
    expert = sum(tensor[0].nbytes for tensor in tensors.values())
    counted = Allocations()

    def release(_: int) -> None:
        counted.given_back += expert

    with counted:
        raw = RawWeights(tensors=tensors, release=release if gives_back else None)
        prepared = manager.process_weights(plan, raw, None)
    kept = sum(tensor.data.nbytes for tensor in prepared.tensors.values())
    assert counted.live == kept
    assert kept > (EXPERTS - 1) * expert
    assert counted.peak <= kept + expert


def test_allocations_are_counted_while_they_live() -> None:
    with Allocations() as counted:
        kept = torch.zeros(100, dtype=torch.uint8)
        passing = kept + 1
        assert kept.view(4, 25).numel() == 100
        del passing
        torch.ones(50, dtype=torch.uint8)
    assert (counted.live, counted.peak) == (100, 200)
