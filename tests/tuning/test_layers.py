"""Random layers and their inputs: what is drawn is finite, differs, and has the size of real weights."""

from __future__ import annotations

import itertools
import sys

import attrs
import pytest
import torch

from moe_core.activation import RELU2, ActivationSpec
from moe_core.errors import MoeCoreError
from moe_core.layer import MoELayer
from moe_core.payloads import RawWeights
from moe_core.quant import BF16, FP8_BLOCK128, SCHEMES
from moe_core.tuning.ceilings import Ceilings
from moe_core.tuning.layers import Batches, _free_host_bytes, bytes_per_expert, layer_floor, random_weights
from moe_core.tuning.reference import Reference
from moe_core.tuning.shapes import SHAPES, LayerShape
from moe_core.weights.expected import expected_tensors

SHAPE = LayerShape(5, 2, 256, 128)
INTERLEAVED = ActivationSpec(row_order="interleaved")


def _request(name, **fields):
    dtype = name if name in ("fp32", "fp16") else "bf16"
    return SHAPE.request(quant=SCHEMES[name], dtype=dtype, **fields)


@pytest.mark.parametrize("name", SCHEMES)
def test_outputs_of_random_weights_have_the_size_of_the_inputs(name):
    request = _request(name)
    layer = MoELayer(request, device="cpu")
    layer.load_weights(RawWeights(tensors=random_weights(request, "cpu", seed=3), handed_over=True))
    output = layer(*Batches.random(request, 9, "cpu", num_sets=1).one(0)).float()
    # Tokens of size one, router weights of 0.6, and a SwiGLU that takes about half away.
    assert 0.2 < float(output.std()) < 3.0


@pytest.mark.parametrize("name", ["bf16", "fp8_block128", "w4a16_int4_asym_g128", "nvfp4"])
def test_experts_differ_and_a_seed_repeats(name):
    request = _request(name, bias=True)
    tensors, again = (random_weights(request, "cpu", seed=1) for _ in range(2))
    other = random_weights(request, "cpu", seed=2)
    assert set(tensors) == set(expected_tensors(request, SHAPE.num_experts))
    for key, tensor in tensors.items():
        bits = [t.contiguous().view(torch.uint8) for t in (tensor, again[key], other[key])]
        assert torch.equal(bits[0], bits[1])
        if "global" not in key and "input" not in key:
            assert not torch.equal(bits[0], bits[2])
            assert not torch.equal(bits[0][0], bits[0][1]), key


@pytest.mark.parametrize("name", ["bf16", "fp8_block128", "w4a16_int4_asym_g128", "nvfp4"])
def test_experts_in_another_order_are_another_layer(name):
    # Of a size at which experts have most values from one row of draws.
    request = LayerShape(5, 1, 256, 128).request(quant=SCHEMES[name])
    tensors = random_weights(request, "cpu")
    hidden, _, weights = Batches.random(request, 8, "cpu", num_sets=1).one(0)
    answers = []
    for expert in range(5):
        ids = torch.full((8, 1), expert)
        answers.append(Reference(request, tensors, (hidden, ids, weights))._answers[0].flatten())
    alike = torch.corrcoef(torch.stack(answers)) - torch.eye(5)
    # Answers of 2048 numbers that have nothing to do with each other.
    assert float(alike.abs().max()) < 0.2


def test_values_of_experts_are_mostly_the_same_and_lie_elsewhere():
    codes = random_weights(SHAPE.request(quant=FP8_BLOCK128), "cpu")["w13"].view(torch.uint8).flatten(1)
    assert torch.equal(codes[0, 4099:], codes[1, :-4099])
    # Of no pair of experts do rows of w13, or columns of w2, agree.
    for first, second in itertools.combinations(range(5), 2):
        assert (second - first) * 4099 % 256 != 0
    assert float((codes[0] == codes[1]).float().mean()) < 0.05


def test_a_draw_says_how_far_it_is_and_can_be_ended():
    seen = []
    request = SHAPE.request(quant=FP8_BLOCK128)
    random_weights(request, "cpu", told=lambda done, total: seen.append((done, total)))
    size = round(bytes_per_expert(random_weights(request, "cpu")) * 5)
    assert (len(seen), seen[-1]) == (4 * 5, (size, size))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    with pytest.raises(ZeroDivisionError):
        random_weights(request, "cpu", told=lambda done, total: 1 / 0)


@pytest.mark.parametrize("fields", [{}, {"tp_size": 2}, {"activation": INTERLEAVED}])
def test_up_is_larger_than_gate_where_there_is_a_gate(fields):
    w13 = random_weights(SHAPE.request(**fields), "cpu")["w13"].float()
    gate, up = (w13[:, 0::2], w13[:, 1::2]) if "activation" in fields else w13.chunk(2, dim=1)
    assert 1.5 < float(up.std() / gate.std()) < 1.9


def test_without_a_gate_there_is_no_up_half():
    plain = random_weights(SHAPE.request(activation=RELU2), "cpu")["w13"]
    assert plain.shape == (5, 128, 256)


def test_stored_bytes_count_scales():
    weights = random_weights(SHAPE.request(quant=FP8_BLOCK128), "cpu")
    # 256 x 256 and 256 x 128 codes, 2 x 2 and 2 x 1 fp32 scales.
    assert bytes_per_expert(weights) == 256 * 256 + 256 * 128 + 4 * (4 + 2)


def test_batches_differ_and_route_each_token_to_distinct_experts():
    request = SHAPES["qwen3-30b-a3b"].request()
    batches = Batches.random(request, 6, "cpu", num_sets=3)
    assert batches.topk_ids.shape == (3, 6, 8)
    assert all(row.unique().numel() == 8 for ids in batches.topk_ids for row in ids)
    assert not torch.equal(batches.topk_ids[0], batches.topk_ids[1])
    assert not torch.equal(batches.hidden_states[0], batches.hidden_states[1])
    assert 8 < batches.active_experts <= 48


@pytest.mark.parametrize(("num_tokens", "sets"), [(1, 16), (16, 4), (256, 4), (257, 2)])
def test_number_of_input_sets_follows_from_the_tokens(num_tokens, sets):
    assert Batches.random(LayerShape(4, 1, 8, 8).request(), num_tokens, "cpu").num_sets == sets


def test_each_call_has_inputs_of_its_own():
    batches = Batches.random(SHAPE.request(), 2, "cpu", num_sets=3)
    seen = [call() for call in batches.calls(lambda *arguments: arguments)]
    for index, arguments in enumerate(seen):
        assert all(map(torch.equal, arguments, batches.one(index)))


def test_floor_reads_active_experts_once_or_multiplies_every_row():
    request = SHAPE.request(quant=BF16)
    batches = Batches.random(request, 1, "cpu", num_sets=2)
    reading = Ceilings(bytes_per_us=10.0, flops_per_us={"bf16": 1e30})
    assert layer_floor(request, batches, 700.0, reading) == 2 * 700.0 / 10.0
    multiplying = Ceilings(bytes_per_us=1e30, flops_per_us={"bf16": 1.0})
    assert layer_floor(request, batches, 700.0, multiplying) == 2 * 2 * 3 * 256 * 128


def test_weights_that_do_not_fit_into_memory_are_refused_before_any_is_made(monkeypatch):
    monkeypatch.setattr("moe_core.tuning.layers._free_host_bytes", lambda: 10**6)
    with pytest.raises(MoeCoreError, match=r"weights take 1\.0 GB, 0\.0 GB of memory are free"):
        random_weights(attrs.evolve(SHAPES["qwen3-30b-a3b"], num_experts=106).request(), "cpu")


def test_memory_that_is_free_is_known_on_linux():
    free = _free_host_bytes()
    assert free is None if sys.platform != "linux" else 10**6 < free < 10**14
