"""Both modes of `deepep` and both fused modes on real ranks, over the emulated library."""

from __future__ import annotations

import attrs
import pytest
import torch
from ascend_layers import A2, A3, alternating, in_threads, outputs_and_answers, small, too_many

from moe_core import LayerRequest, Workload
from moe_core.environment import Environment
from moe_core.quant import BF16, W4A4_INT4, W4A8_INT8, W8A8_INT8, LayerQuant
from moe_core.testing.compare import relative_error
from moe_core.testing.ranks import RankError, run_on_ranks

#: Of the whole output. bf16 rounds tokens, rows and sums to 8 bits. The answer rounds tokens as the scheme says, so
#: that what is left are codes on the other side of a tie: an int8 step is 1/127 of a row's largest value, an int4 step
#: is 1/7.
TOLERANCE = {BF16: 1e-2, W8A8_INT8: 2e-2, W4A8_INT8: 2e-2, W4A4_INT4: 0.1}
PREFILL = {"workloads": Workload(phase="decode", max_tokens=300), "a2a_backend": "deepep.normal"}
DECODE = {"a2a_backend": "deepep.low_latency"}
MODES = {"normal": PREFILL, "low_latency": DECODE}


def check(requests: list[LayerRequest], counts: list[int], machine: Environment = A3) -> None:
    by_rank = run_on_ranks(outputs_and_answers, [(requests, counts, machine)] * len(counts))
    for found, count in zip(by_rank, counts, strict=True):
        assert not isinstance(found, RankError), found
        for layer, (output, answer, twice) in zip(requests, found, strict=True):
            tensors = [torch.from_numpy(array) for array in (output, answer, twice)]
            compare(*tensors, layer, count)


def compare(output: torch.Tensor, answer: torch.Tensor, twice: torch.Tensor, layer: LayerRequest, count: int) -> None:
    tolerance = TOLERANCE[layer.quant.w13]
    assert output.shape == (count, layer.hidden_size)
    if count:
        assert relative_error(output, answer) < tolerance, layer
        # The weights are such that rows which were weighted twice, or not at all, would show.
        assert relative_error(twice, answer) > 2 * tolerance
    if count > 2:
        assert (output[1] == 0).all(), "a token without experts is zero whatever it holds"


def test_every_scheme_in_both_modes_with_unequal_tokens_and_experts() -> None:
    schemes = [LayerQuant.of(scheme) for scheme in (BF16, W8A8_INT8, W4A8_INT8, W4A4_INT4)]
    schemes.append(LayerQuant(W4A4_INT4, W8A8_INT8))
    check([small(quant=quant, **fields) for quant in schemes for fields in MODES.values()], [7, 3])


def test_a_rank_without_tokens() -> None:
    requests = [small(quant=quant, num_experts=4, **mode) for quant in (BF16, W8A8_INT8) for mode in MODES.values()]
    check(requests, [0, 5])


FUSED = {"quant": W8A8_INT8, "a2a_backend": "ascend_fuseep", "intermediate_size": 512}


def test_no_rank_has_tokens() -> None:
    requests = [*(small(quant=W8A8_INT8, **fields) for fields in MODES.values()), small(**FUSED)]
    check(requests, [0, 0])


def test_tokens_in_bf16_for_experts_that_round_them_themselves() -> None:
    check([small(quant=W8A8_INT8, dispatch_dtype="bf16", **mode) for mode in MODES.values()], [4, 1])


@pytest.mark.parametrize("counts", [[6, 2], [0, 4]])
def test_both_fused_modes(counts: list[int]) -> None:
    # No more than are there: mode 2 counts received rows, of which there are several for a token.
    workload = Workload(phase="decode", max_tokens=max(counts))
    requests = [
        small(**FUSED, runner_backend=f"fuseep.mode{mode}", num_experts=experts, workloads=workload)
        for mode in (1, 2)
        for experts in (4, 5)
    ]
    check(requests, counts)


def test_the_modes_of_a2() -> None:
    requests = [
        small(quant=W8A8_INT8, num_experts=3, hidden_size=7168, intermediate_size=32, a2a_backend="deepep.a2_normal"),
        small(quant=W8A8_INT8, hidden_size=96, a2a_backend="deepep.a2_low_latency"),
    ]
    check(requests, [3, 0], A2)


def test_two_models_in_threads_of_their_own() -> None:
    # The library is told by argument, so that no thread waits for a variable inside the other's collective.
    requests = [small(quant=W8A8_INT8, **PREFILL), small(quant=BF16, **PREFILL), small(quant=W8A8_INT8, **DECODE)]
    for found in run_on_ranks(in_threads, [(requests,)] * 2):
        assert not isinstance(found, RankError), found
        assert [len(errors) for errors in found] == [4, 4, 4]
        assert max(max(errors) for errors in found) < 2e-2


@pytest.mark.error_path
def test_too_many_tokens_raise_before_anything_is_sent() -> None:
    workload = Workload(phase="decode", max_tokens=6)
    fields = {"quant": W8A8_INT8, "workloads": workload}
    requests = [small(**{**mode, **fields}) for mode in (PREFILL, DECODE, FUSED)]
    first, second = run_on_ranks(too_many, [(requests,)] * 2)
    for (told, error), (_, other) in zip(first, second, strict=True):
        if "7 tokens on this rank" not in told or max(error, other) > 2e-2:
            raise AssertionError(f"{told!r}, errors {error} and {other}")


def test_three_ranks() -> None:
    check([small(quant=W8A8_INT8, ep_size=3, **DECODE), small(**FUSED, ep_size=3, num_experts=7)], [3, 0, 1])


@pytest.mark.parametrize("variable", [None, "1"])
def test_a_bf16_draft_and_an_int8_target_alternate_on_an_old_library(variable: str | None) -> None:
    target = small(quant=W8A8_INT8, **PREFILL)
    draft = small(quant=BF16, intermediate_size=96, **PREFILL)
    layers = [attrs.evolve(layer, workloads=Workload(max_tokens=300)) for layer in (target, draft)]
    for found in run_on_ranks(alternating, [(layers, variable)] * 2):
        assert not isinstance(found, RankError), found
        seen, afterwards, errors = found
        assert seen == ["1", "0", "1", "0"]
        assert afterwards == variable
        assert max(errors) < 2e-2
