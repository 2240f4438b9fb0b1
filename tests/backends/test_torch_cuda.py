"""The torch runners on an NVIDIA GPU: numbers, no host synchronisation, graph capture. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import oracle
import pytest
import torch
from layers import build, exact, random_tensors, random_tokens
from quantized import QUANTS, random_quantized
from reference_moe import rel

from moe_core import ExpertGroup, ExpertPlacement, LayerRequest, MoELayer, Workload
from moe_core.kernels.slots import EvenIds
from moe_core.quant import SCHEMES, LayerQuant

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

LAYER = LayerRequest(num_experts=9, top_k=3, hidden_size=64, intermediate_size=48)
#: Operands of both GEMMs, the activation and the output are rounded once each; fp32 stays above TF32's 1e-3.
TOLERANCE = {"fp32": 2e-6, "bf16": 1.2e-2, "fp16": 3e-3}
MODES = ("standard", "contiguous", "masked")
#: On two ranks: shares of 5 and 4 experts in their order and dealt out, and 11 slots of which 2 are second copies.
PLACEMENTS = {
    "uneven": ExpertPlacement(),
    "round_robin": ExpertPlacement("round_robin"),
    "copies": ExpertPlacement("map", (3, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0)),
}


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


def _any_layer(name: str, mode: str) -> tuple[LayerRequest, dict[str, torch.Tensor], dict[str, Any]]:
    """A request, its tensors, and what they mean."""
    workload = Workload(phase="decode", max_tokens=33, graph_capture=True)
    request = attrs.evolve(LAYER, a2a_backend=f"none.{mode}", bias=True, workloads=[workload])
    if name in QUANTS:
        dtype = "bf16" if name == "int4_and_bf16" else "fp16"
        request = attrs.evolve(request, dtype=dtype, quant=QUANTS[name])
        return request, *random_quantized(request)
    # Rows that are not a multiple of 16 bytes, which the grouped GEMM refuses.
    width = 44 if name == "bf16 in blocks" else 48
    dtype = name.partition(" ")[0]
    request = attrs.evolve(request, dtype=dtype, quant=LayerQuant.of(SCHEMES[dtype]), intermediate_size=width)
    tensors = random_tensors(request)
    return request, tensors, dict(tensors)


@pytest.fixture
def restored_sync_mode() -> Iterator[None]:
    """A test that fails while waiting is an error leaves it none for others."""
    before = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.usefixtures("restored_sync_mode")
@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "bf16 in blocks", *QUANTS])
def test_a_captured_graph_follows_new_routings_without_waiting(name: str, mode: str, num_tokens: int) -> None:
    request, tensors, meaning = _any_layer(name, mode)
    layer, static = build(request, tensors, device="cuda"), _tokens(request, num_tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(*static)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(*static)
    limit = TOLERANCE[request.dtype] if name not in QUANTS else TOLERANCE["bf16"]
    for seed in (2, 3):
        fresh = _tokens(request, num_tokens, seed)
        if seed == 3:
            # All rows at one expert, and none at the others.
            fresh[1].clamp_(max=-1)
            fresh[1][:, 0] = 4
        for target, value in zip(static, fresh, strict=True):
            target.copy_(value)
        graph.replay()
        want = oracle.layer(*(tensor.cpu() for tensor in fresh), meaning, request.activation)
        assert rel(output.cpu().double(), want) < limit


def _ranks(placement: str, mode: str, dtype: str) -> tuple[LayerRequest, dict[str, torch.Tensor], list[MoELayer]]:
    """A request, its tensors, and a new layer for each of its ranks, which all have every token."""
    request = attrs.evolve(
        LAYER,
        ep_size=2,
        token_placement="replicated",
        placement=PLACEMENTS[placement],
        dtype=dtype,
        quant=LayerQuant.of(SCHEMES[dtype]),
        a2a_backend=f"none.{mode}",
        workloads=[Workload(phase="decode", max_tokens=33, graph_capture=True)],
    )
    tensors = random_tensors(request)
    return request, tensors, [build(request, tensors, ExpertGroup(rank=r, size=2), "cuda") for r in range(2)]


@pytest.mark.usefixtures("restored_sync_mode")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_first_forward_of_a_rank_does_not_wait(placement: str, mode: str) -> None:
    request, tensors, layers = _ranks(placement, mode, "bf16")
    tokens = _tokens(request, 33)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    parts = [layer(*tokens) for layer in layers]
    torch.cuda.set_sync_debug_mode("default")
    total = sum(part.cpu().double() for part in parts)
    assert rel(total, _exact(request, tensors, tokens)) < TOLERANCE["bf16"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_graph_takes_the_first_forward_of_a_rank(placement: str, mode: str, dtype: str) -> None:
    request, tensors, layers = _ranks(placement, mode, dtype)
    static = _tokens(request, 33)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = [layer(*static) for layer in layers]
    for seed in (2, 3):
        fresh = _tokens(request, 33, seed)
        for target, value in zip(static, fresh, strict=True):
            target.copy_(value)
        graph.replay()
        total = sum(part.cpu().double() for part in parts)
        assert rel(total, _exact(request, tensors, fresh)) < TOLERANCE["bf16"]


@pytest.mark.usefixtures("restored_sync_mode")
def test_the_first_ids_of_a_library_do_not_wait() -> None:
    request = attrs.evolve(LAYER, ep_size=2)
    even, slots = EvenIds(request, torch.device("cuda")), _tokens(request, 33)[1]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    ids, of_checked = even(slots), even.of_checked(slots)
    torch.cuda.set_sync_debug_mode("default")
    want = EvenIds(request, None)(slots.cpu())
    assert torch.equal(ids.cpu(), want)
    assert torch.equal(of_checked.cpu(), want)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_fp16_survives_what_it_cannot_hold_between(num_tokens: int) -> None:
    request = attrs.evolve(LAYER, dtype="fp16", quant=LayerQuant.of(SCHEMES["fp16"]))
    tensors = random_tensors(request)
    hidden_states, topk_ids, topk_weights = _tokens(request, num_tokens)
    tokens = hidden_states * 400, topk_ids, topk_weights * 2.0**-8
    raw = _exact(request, tensors, (tokens[0], topk_ids, torch.ones_like(topk_weights)))
    assert raw.abs().max() > 2 * torch.finfo(torch.float16).max
    output = build(request, tensors, device="cuda")(*tokens)
    assert rel(output.cpu().double(), _exact(request, tensors, tokens)) < TOLERANCE["fp16"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_block128"])
def test_full_graph(name: str, mode: str) -> None:
    request, tensors, meaning = _any_layer(name, mode)
    compiled = torch.compile(build(request, tensors, device="cuda"), fullgraph=True, backend="aot_eager")
    # From the second on with a number of tokens that is no constant.
    for num_tokens in (33, 9, 20):
        tokens = _tokens(request, num_tokens)
        want = oracle.layer(*(tensor.cpu() for tensor in tokens), meaning, request.activation)
        assert rel(compiled(*tokens).cpu().double(), want) < TOLERANCE["bf16"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_idle_experts_full_of_nan_do_not_matter(dtype: str) -> None:
    request = attrs.evolve(LAYER, dtype=dtype, quant=LayerQuant.of(SCHEMES[dtype]))
    tensors = random_tensors(request)
    hidden_states, topk_ids, topk_weights = _tokens(request, 9)
    topk_ids = topk_ids.clamp(max=2)
    want = _exact(request, tensors, (hidden_states, topk_ids, topk_weights))
    for tensor in tensors.values():
        tensor[3:] = torch.nan
    output = build(request, tensors, device="cuda")(hidden_states, topk_ids, topk_weights)
    assert rel(output.cpu().double(), want) < TOLERANCE["bf16"]
