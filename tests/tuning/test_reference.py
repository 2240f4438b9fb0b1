"""The fp32 layer that everything is compared with, against the conformance kit's float64 one, which shares no code."""

from __future__ import annotations

import pytest
import torch
from layers import build
from quantized import QUANTS

from moe_core.activation import RELU2, SWIGLU, SWIGLU_OAI
from moe_core.quant import SCHEMES
from moe_core.testing.stored import draw_layer
from moe_core.tuning.layers import Batches, random_weights
from moe_core.tuning.reference import Reference, WrongResultError
from moe_core.tuning.shapes import LayerShape

SHAPE = LayerShape(4, 2, 256, 128)


def _both(request, num_tokens=6):
    """The reference, the other answer, and the stored layer."""
    stored = draw_layer(request)
    inputs = Batches.random(request, num_tokens, "cpu", num_sets=1, seed=5).one(0)
    return Reference(request, stored.tensors, inputs), stored.reference(*inputs)


@pytest.mark.parametrize(
    "name",
    [
        "fp32",
        "fp8_block128_w8a16",
        "w8a16_int8",
        "w4a16_int4_asym_g128",
        "mxfp4_w4a16",
        "nvfp4_w4a16",
        "fp8_tensor_w8a16",
    ],
)
def test_weights_are_read_as_the_formats_say(name):
    request = SHAPE.request(quant=SCHEMES[name], dtype="fp32" if name == "fp32" else "bf16")
    reference, answer = _both(request)
    assert reference.error(answer) < 1e-5


@pytest.mark.parametrize(
    "fields", [{"activation": SWIGLU_OAI, "bias": True}, {"activation": RELU2}, {"weight_on_input": True}]
)
def test_biases_interleaved_rows_no_gate_and_weights_on_inputs(fields):
    reference, answer = _both(SHAPE.request(dtype="fp32", **fields))
    assert reference.error(answer) < 1e-5


@pytest.mark.parametrize("name", ["fp8_block128", "w8a8_int8", "w4a8_int8", "mxfp8", "mxfp4", "nvfp4", "w4a4_int4"])
def test_rounded_activations_are_within_the_tolerance_and_not_far_from_it(name):
    request = SHAPE.request(quant=SCHEMES[name])
    reference, answer = _both(request, num_tokens=32)
    assert reference.tolerance / 8 < reference.error(answer) < reference.tolerance
    # The other layer rounds alike.
    assert reference._errors(answer)[1] < reference.tolerance / 4


@pytest.mark.parametrize("name", ["bf16", "fp8_block128", "fp8_tensor_static", "mxfp4"])
def test_swapped_halves_are_beyond_the_tolerance(name):
    request = SHAPE.request(quant=SCHEMES[name])
    weights = random_weights(request, "cpu")
    swapped = {
        key: torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1) if key.startswith("w13") and tensor.dim() > 1 else tensor
        for key, tensor in weights.items()
    }
    inputs = Batches.random(request, 6, "cpu", num_sets=1).one(0)
    wrong = Reference(request, swapped, inputs)._answers
    reference = Reference(request, weights, inputs)
    assert all(min(reference._errors(each)) > 1.5 * reference.tolerance for each in wrong)


@pytest.mark.parametrize("name", ["int8_row_static", "fp8_tensor_static", "w4afp8"])
@pytest.mark.parametrize("activation", [SWIGLU, RELU2])
def test_static_scales_that_are_too_large_for_a_row_are_no_fault(name, activation):
    request = SHAPE.request(quant=QUANTS[name], activation=activation)
    weights = random_weights(request, "cpu")
    layer = build(request, weights)
    for seed in range(3):
        inputs = Batches.random(request, 1, "cpu", num_sets=1, seed=seed).one(0)
        Reference(request, weights, inputs).check(layer(*inputs))


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out: out * torch.nan, "it is NaN or infinite"),
        (lambda out: out / 0, "it is NaN or infinite"),
        (lambda out: out * 1.01, "relative error 0.01, at most 0.0001 is due to rounding"),
        (lambda out: out[:, 1:], r"expected shape \[6, 256\], got \[6, 255\]"),
        (lambda out: out[:1], r"expected shape \[6, 256\], got \[1, 256\]"),
        (lambda out: None, "expected a tensor, got NoneType"),
    ],
)
def test_what_is_wrong_is_refused_and_said(spoil, said):
    reference, answer = _both(SHAPE.request(dtype="fp32"))
    assert reference.check(answer) == reference.error(answer)
    with pytest.raises(WrongResultError, match=f"^wrong result: {said}$"):
        reference.check(spoil(answer))


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100])
def test_of_many_tokens_some_are_compared_the_last_one_too(num_tokens):
    reference, answer = _both(SHAPE.request(dtype="fp32"), num_tokens)
    assert reference.check(answer) < 1e-5
    spoilt = 0
    for token in range(num_tokens):
        other = answer.clone()
        other[token] = 0.0
        spoilt += reference.error(other) > 0.01
    assert spoilt == min(num_tokens, 32)
    answer[-1] = torch.nan
    assert reference.error(answer) == float("inf")
