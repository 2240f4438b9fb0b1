"""Both modes of `deepep` on real ranks, over the emulated library, with the runners of DeepGEMM and of torch."""

from __future__ import annotations

from typing import Any

import emulated_deep_ep
import pytest
import torch
from deepep_layers import B200, DECODE, H100, outputs_and_answers, small

from moe_core import ExpertGroup, LayerRequest, Workload
from moe_core.quant import BF16, FP8_BLOCK128, FP8_BLOCK128_UE8M0, QuantScheme
from moe_core.testing.compare import relative_error
from moe_core.testing.ranks import RankError, run_on_ranks

#: Of the whole output. bf16 rounds tokens, rows and sums to 8 bits; e4m3 has 4, and the answer rounds tokens by other
#: scales than the library, whose amax has a floor and whose code is a product with a reciprocal.
TOLERANCE = {"bf16": 1e-2, "fp8": 5e-2}


def check(requests: list[LayerRequest], counts: list[int], machine: Any = H100) -> None:
    by_rank = run_on_ranks(outputs_and_answers, [(requests, counts, machine)] * len(counts))
    for found, count in zip(by_rank, counts, strict=True):
        assert not isinstance(found, RankError), found
        layers = [layer for layer in requests for _ in layer.workloads]
        for layer, (*arrays, num_calls) in zip(layers, found, strict=True):
            tensors = [torch.from_numpy(array) for array in arrays]
            compare(tensors, layer, count)
            assert num_calls == 1


def compare(tensors: list[torch.Tensor], layer: LayerRequest, count: int) -> None:
    output, overlapped, answer, twice = tensors
    tolerance = TOLERANCE["fp8" if layer.quant.w13.is_quantized else "bf16"]
    assert output.shape == (count, layer.hidden_size)
    assert torch.equal(output, overlapped), "an overlap changes when tokens arrive, and nothing else"
    if count:
        assert relative_error(output, answer) < tolerance, layer
        # The weights are such that rows which were weighted twice, or not at all, would show.
        assert relative_error(twice, answer) > 2 * tolerance
    if count > 2:
        assert (output[1] == 0).all(), "a token without experts is zero whatever it holds"


@pytest.mark.parametrize("runner", ["torch", "deep_gemm"])
@pytest.mark.parametrize("quant", [BF16, FP8_BLOCK128], ids=str)
def test_both_modes_over_one_set_of_weights(runner: str, quant: QuantScheme) -> None:
    check([small(quant=quant, runner_backend=runner)], [7, 3])


def bytes_of_tokens(group: ExpertGroup, requests: list[LayerRequest]) -> list[int]:
    """A rank's job: bytes of a token in each dispatch."""
    outputs_and_answers(group, requests, [2, 2])
    return emulated_deep_ep.Runtime.sent


def test_fp8_halves_what_is_sent() -> None:
    requests = [small(quant=quant, runner_backend="deep_gemm", num_experts=4) for quant in (BF16, FP8_BLOCK128)]
    for found in run_on_ranks(bytes_of_tokens, [(requests,)] * 2):
        # Two modes, alone and beside an overlap; a scale of four bytes for 128 codes.
        assert found == [2 * 2048] * 4 + [2048 + 4 * 16] * 4


def test_fp8_experts_of_bf16_tokens() -> None:
    check([small(quant=FP8_BLOCK128, runner_backend="deep_gemm", dispatch_dtype="bf16", num_experts=4)], [4, 1])


def test_ranks_without_tokens() -> None:
    requests = [small(quant=quant, runner_backend="deep_gemm", num_experts=4) for quant in (BF16, FP8_BLOCK128)]
    check(requests, [0, 5])
    check(requests[:1], [0, 0])


def test_powers_of_two_on_blackwell() -> None:
    check([small(quant=FP8_BLOCK128_UE8M0, runner_backend="deep_gemm")], [3, 2], B200)


def test_three_ranks_and_ten_experts_per_token() -> None:
    decode = small(ep_size=3, num_experts=16, top_k=10, workloads=DECODE, runner_backend="deep_gemm")
    check([decode], [3, 0, 8])


def test_four_ranks_with_one_expert_each_and_one_without() -> None:
    check(
        [small(ep_size=4, num_experts=5, workloads=Workload(phase="prefill"), runner_backend="deep_gemm")], [2, 3, 0, 1]
    )
