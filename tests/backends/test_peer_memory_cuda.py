"""Two GPUs that write into each other's memory. Skipped where there are fewer."""

from __future__ import annotations

import attrs
import pytest
import torch
from layers import exact, random_tensors, random_tokens
from ranks import run_on_ranks
from reference_moe import rel

from moe_core import LayerRequest, Workload

pytest.importorskip("triton", reason="needs triton")
import peer_layers

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")

LAYER = LayerRequest(
    num_experts=9,
    top_k=3,
    hidden_size=256,
    intermediate_size=128,
    ep_size=2,
    a2a_backend="peer_memory.standard",
    runner_backend="triton",
    workloads=(Workload(max_tokens=700, graph_capture=True),),
)


@pytest.mark.parametrize("mode", ["standard", "contiguous", "masked"])
def test_values(mode: str) -> None:
    request = attrs.evolve(LAYER, a2a_backend=f"peer_memory.{mode}")
    tensors = random_tensors(request)
    counts = [(700, 0, 3, 1), (5, 9, 0, 650)]
    forwards = [[_tokens(count, 10 * step + rank) for step, count in enumerate(own)] for rank, own in enumerate(counts)]
    jobs = [(request, tensors, own) for own in forwards]
    for own, output in zip(forwards, run_on_ranks(peer_layers.outputs, jobs, backend="nccl"), strict=True):
        assert isinstance(output, torch.Tensor), output
        # Each rank's partial sum is rounded to bf16 once more than on one rank.
        assert rel(output, torch.cat([exact(request, tensors, tokens) for tokens in own])) < 1.5e-2


def test_a_captured_forward_is_replayed_with_other_tokens() -> None:
    tensors = random_tensors(LAYER)
    jobs = [(LAYER, tensors, [_tokens(64, 10 * step + rank) for step in range(50)]) for rank in range(2)]
    assert run_on_ranks(peer_layers.replays_differ, jobs, backend="nccl") == [[], []]


@pytest.mark.error_path
def test_a_forward_that_was_left_midway_is_not_taken_for_the_next() -> None:
    jobs = [(LAYER, random_tensors(LAYER), _tokens(64, rank)) for rank in range(2)]
    for said, distances in run_on_ranks(peer_layers.left_midway, jobs, backend="nccl"):
        assert [text[:18] for text in said] == ["no memory for you", *["dispatcher peer_me"] * 2]
        assert distances == [0.0, 0.0]


def _tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """No token names an expert twice, which the masked format has no room for."""
    hidden, _, weights = random_tokens(LAYER, count, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(count, LAYER.num_experts, generator=generator).topk(LAYER.top_k).indices
    ids[::4, 1], ids[3::7] = -1, -1
    return hidden, ids, weights
