"""The torch runners on an NVIDIA GPU: numbers, no host synchronisation, graph capture. Skipped where there is none."""

from __future__ import annotations

import attrs
import oracle
import pytest
import torch
from layers import build, exact, random_tensors, random_tokens
from quantized import QUANTS, random_quantized
from reference_moe import rel

from moe_core import LayerRequest, Workload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

LAYER = LayerRequest(num_experts=9, top_k=3, hidden_size=64, intermediate_size=48)
#: Operands of both GEMMs, the activation and the output are rounded once each; fp32 stays above TF32's 1e-3.
TOLERANCE = {"fp32": 2e-6, "bf16": 1.2e-2, "fp16": 3e-3}
MODES = ("standard", "contiguous", "masked")


def _tokens(request: LayerRequest, num_tokens: int, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """On the GPU; no token names an expert twice, which the masked format has no room for there."""
    hidden_states, _, topk_weights = random_tokens(request, num_tokens, seed)
    scores = torch.rand(num_tokens, request.num_experts, generator=torch.Generator().manual_seed(seed))
    topk_ids = scores.topk(request.top_k).indices
    topk_ids[::4, 1] = -1
    return hidden_states.cuda(), topk_ids.cuda(), topk_weights.cuda()


def _exact(request: LayerRequest, tensors: dict[str, torch.Tensor], tokens: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return exact(request, tensors, tuple(tensor.cpu() for tensor in tokens))


@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_numbers(mode: str, dtype: str, bias: bool, num_tokens: int) -> None:
    request = LayerRequest(
        num_experts=9, top_k=3, hidden_size=64, intermediate_size=48, dtype=dtype, bias=bias, a2a_backend=f"none.{mode}"
    )
    tensors, tokens = random_tensors(request), _tokens(request, num_tokens)
    output = build(request, tensors, device="cuda")(*tokens)
    assert rel(output.cpu().double(), _exact(request, tensors, tokens)) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", QUANTS)
def test_numbers_of_every_scheme(name: str, mode: str, num_tokens: int) -> None:
    quant = QUANTS[name]
    dtype = "fp16" if quant.w13.is_quantized and quant.w2.is_quantized else "bf16"
    request = attrs.evolve(LAYER, hidden_size=72, dtype=dtype, quant=quant, bias=True, a2a_backend=f"none.{mode}")
    tensors, meaning = random_quantized(request)
    tokens = _tokens(request, num_tokens)
    output = build(request, tensors, device="cuda")(*tokens).cpu()
    want = oracle.layer(*(tensor.cpu() for tensor in tokens), meaning, request.activation)
    assert rel(output.double(), want) < TOLERANCE["bf16"]


@pytest.mark.parametrize("mode", MODES)
def test_a_bf16_forward_never_waits_for_the_gpu(mode: str) -> None:
    request = attrs.evolve(LAYER, a2a_backend=f"none.{mode}")
    layer, tokens = build(request, random_tensors(request), device="cuda"), _tokens(request, 17)
    layer(*tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(*tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", MODES)
def test_a_captured_graph_follows_new_routings(mode: str) -> None:
    workload = Workload(phase="decode", max_tokens=8, graph_capture=True)
    request = attrs.evolve(LAYER, a2a_backend=f"none.{mode}", workloads=[workload])
    tensors = random_tensors(request)
    layer, static = build(request, tensors, device="cuda"), _tokens(request, 8)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(*static)
    for seed in (2, 3):
        fresh = _tokens(request, 8, seed)
        for target, value in zip(static, fresh, strict=True):
            target.copy_(value)
        graph.replay()
        assert rel(output.cpu().double(), _exact(request, tensors, fresh)) < TOLERANCE["bf16"]


def test_idle_experts_full_of_nan_do_not_matter() -> None:
    tensors = random_tensors(LAYER)
    hidden_states, topk_ids, topk_weights = _tokens(LAYER, 9)
    topk_ids = topk_ids.clamp(max=2)
    want = _exact(LAYER, tensors, (hidden_states, topk_ids, topk_weights))
    for tensor in tensors.values():
        tensor[3:] = torch.nan
    output = build(LAYER, tensors, device="cuda")(hidden_states, topk_ids, topk_weights)
    assert rel(output.cpu().double(), want) < TOLERANCE["bf16"]
