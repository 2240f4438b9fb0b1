"""Bound experts at their edges: ranks without experts, one token of any stride, memory that calls share."""

from __future__ import annotations

import pytest
import torch
from cutedsl_layers import B200, DISPATCHERS, EARLIER, manager, small_layer
from moe_plugin_flashinfer.emulation import emulated

from moe_core import ExpertGroup, LayerRequest, MoELayer, Workload
from moe_core.payloads import MaskedTokens
from moe_core.quant import NVFP4
from moe_core.testing.memory import same_bits
from moe_core.testing.stored import draw_layer


@pytest.mark.parametrize("kernel", DISPATCHERS)
def test_a_rank_without_experts_adds_nothing(kernel: str) -> None:
    sizes = {"num_experts": 1, "top_k": 1, "hidden_size": 128, "intermediate_size": 64, "quant": NVFP4}
    request = LayerRequest(
        **sizes,
        ep_size=2,
        token_placement="replicated",
        runner_backend="flashinfer_cutedsl",
        a2a_backend=DISPATCHERS[kernel],
    )
    layer = MoELayer(request, environment=B200, manager=manager(), group=ExpertGroup(rank=1, size=2))
    layer.load_weights(draw_layer(LayerRequest(**sizes)).raw(layer.local_experts, "cpu"))
    assert layer.local_experts == ()
    output = layer(torch.randn(3, 128).to(torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert torch.equal(output, torch.zeros(3, 128, dtype=torch.bfloat16))


@pytest.mark.parametrize("kernel", DISPATCHERS)
def test_one_token_may_have_any_stride(kernel: str) -> None:
    layer = small_layer(kernel)
    experts = layer.bind()
    hidden, ids, weights = (tensor[2:3] for tensor in layer.tokens())
    columns = hidden.reshape(-1, 1).clone().T
    assert columns.stride() == (1, 1)
    assert same_bits(experts(columns, ids, weights), experts(hidden, ids, weights))


def test_a_result_stays_where_calls_share_memory() -> None:
    captured = Workload(phase="decode", max_tokens=32, graph_capture=True)
    with emulated("0.6.11.post3"):
        layer = small_layer("wrapper", EARLIER, workloads=captured)
        experts = layer.bind()
        first = experts(*layer.tokens())
        kept = first.clone()
        experts(*layer.tokens(5))
        alone = small_layer("wrapper", EARLIER)
        assert same_bits(first, kept)
        assert same_bits(first, alone.bind()(*alone.tokens()))


def test_blocks_may_be_slices_of_longer_ones() -> None:
    layer = small_layer("masked")
    route = layer.bind().routes[0]
    tokens, _ = route.dispatch(*layer.tokens())  # type: ignore[misc]
    rows, counts = tokens.hidden_states, tokens.masked_m
    longer = torch.full((rows.shape[0], 2 * rows.shape[1], rows.shape[2]), torch.nan, dtype=torch.bfloat16)
    longer[:, : rows.shape[1]] = rows
    sliced = MaskedTokens(hidden_states=longer[:, : rows.shape[1]], masked_m=counts)
    is_real = torch.arange(rows.shape[1]) < counts[:, None]
    assert same_bits(route.experts(sliced)[is_real], route.experts(tokens)[is_real])  # type: ignore[misc]
