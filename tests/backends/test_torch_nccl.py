"""All-to-all over NCCL between two GPUs. Skipped where there are fewer."""

from __future__ import annotations

import attrs
import pytest
import torch
from layers import exact, layer_output, random_tensors, random_tokens
from ranks import run_on_ranks
from reference_moe import rel

from moe_core import LayerRequest

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")

LAYER = LayerRequest(num_experts=9, top_k=3, hidden_size=64, intermediate_size=48, ep_size=2)


@pytest.mark.parametrize("counts", [(5, 9), (0, 7), (0, 0)])
@pytest.mark.parametrize("mode", ["standard", "contiguous"])
def test_two_gpus(mode: str, counts: tuple[int, int]) -> None:
    request = attrs.evolve(LAYER, a2a_backend=f"torch_alltoall.{mode}")
    tensors = random_tensors(request)
    tokens = [random_tokens(request, count, seed=20 + rank) for rank, count in enumerate(counts)]
    outputs = run_on_ranks(layer_output, [(request, tensors, own) for own in tokens], backend="nccl")
    for output, own in zip(outputs, tokens, strict=True):
        assert isinstance(output, torch.Tensor), output
        want = exact(request, tensors, own)
        # Each rank's partial sum is rounded to bf16 once more than on one rank.
        assert output.shape == want.shape
        assert rel(output, want) < 1.5e-2 or not want.numel()
