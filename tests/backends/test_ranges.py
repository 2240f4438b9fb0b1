"""A layer whose ranges of token counts run on two plugins over one set of weights."""

from __future__ import annotations

import attrs
import pytest
import torch
from layers import random_tensors, random_tokens
from measured import measured
from triton_layers import DEVICE, both_manager, output, triton_layer

from moe_core import LayerRequest, MoELayer, RawWeights
from moe_core.environment import load_environment

pytest.importorskip("triton", reason="needs triton")

LAYER = LayerRequest(num_experts=5, top_k=3, hidden_size=64, intermediate_size=48)
FEW, MANY = "triton:triton.fused", "torch:none.contiguous + torch:torch.contiguous"
#: Few tokens go one way up to 5, the geometric middle of 3 and 12, and more the other way.
TIMES = {FEW: {3: 10.0, 12: 40.0}, MANY: {3: 30.0, 12: 20.0}}
PINS = {
    FEW: {"runner_backend": "triton.fused"},
    MANY: {"runner_backend": "torch.contiguous", "a2a_backend": "none.contiguous"},
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return random_tensors(LAYER)


@pytest.fixture(scope="module")
def layer(tensors: dict[str, torch.Tensor]) -> MoELayer:
    table = measured(LAYER, TIMES, arch="sm90")
    made = MoELayer(LAYER, environment=load_environment("h100"), manager=both_manager(), measurements=table)
    made.load_weights(RawWeights(tensors={name: tensor.to(DEVICE) for name, tensor in tensors.items()}))
    return made


def test_the_routes(layer: MoELayer) -> None:
    assert [(route.candidate.full_name, route.max_tokens) for route in layer.plan.routes] == [
        (FEW, 5),
        (MANY, 12),
        (FEW, None),
    ]


@pytest.mark.parametrize(("num_tokens", "runs"), [(1, FEW), (5, FEW), (6, MANY), (12, MANY), (13, FEW)])
def test_each_count_runs_what_its_range_says(
    layer: MoELayer, tensors: dict[str, torch.Tensor], num_tokens: int, runs: str
) -> None:
    tokens = random_tokens(LAYER, num_tokens)
    pinned = triton_layer(attrs.evolve(LAYER, **PINS[runs]), tensors)
    assert torch.equal(output(layer, tokens), output(pinned, tokens))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("num_tokens", [5, 6])
def test_a_captured_forward_keeps_its_route(layer: MoELayer, num_tokens: int) -> None:
    first, second = (tuple(t.cuda() for t in random_tokens(LAYER, num_tokens, seed)) for seed in (1, 2))
    inputs = tuple(tensor.clone() for tensor in first)
    layer(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(*inputs)
    for tensor, new in zip(inputs, second, strict=True):
        tensor.copy_(new)
    graph.replay()
    assert torch.equal(captured, layer(*second))
