"""Quantized layers on the Triton runners against the values that their stored weights stand for, in float64."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import attrs
import pytest
import torch
from layers import random_tokens
from oracle import activate, relative_error
from oracle import layer as layer_in_float64
from quantized import QUANTS, exact_quantized, random_quantized, rounding
from triton_layers import DEVICE, fewest_rows, output, pretend_card, triton_layer

from moe_core import LayerRequest, RawWeights
from moe_core.activation import SWIGLU, ActivationSpec
from moe_core.errors import WeightsError
from moe_core.quant import (
    BF16,
    FP8_BLOCK128,
    FP8_BLOCK128_W8A16,
    MXFP4_W4A16,
    W4A16_INT4_G128,
    W8A8_INT8,
    W8A16_INT8,
    LayerQuant,
    QuantScheme,
)

pytest.importorskip("triton", reason="needs triton")
from moe_core.backends.triton.weights import operands_of

SCHEMES = {
    name: QUANTS[name]
    for name in (
        "fp8_block128",
        "fp8_channel",
        "w8a8_int8",
        "fp8_tensor_static",
        "int8_row_static",
        "mxfp4_w4a16",
        "nvfp4_w4a16",
        "w4a16_int4_g32",
        "int4_groups_zero",
        "int4_row_zero",
        "int8_groups",
        "fp8_row_weights",
    )
} | {
    # What a tensor-parallel cut makes of the first.
    "fp8_block128_cut": LayerQuant(
        attrs.evolve(FP8_BLOCK128, weight_block=(64, 128)), attrs.evolve(FP8_BLOCK128, weight_block=(128, 64))
    ),
    "int4_groups_bf16": LayerQuant.of(QuantScheme(weight_dtype="int4", weight_block=(1, 128), weight_scale="bf16")),
}
#: Rows that come in blocks are rounded where they are; one scheme per way of scaling will do.
CASES = [*((name, "none") for name in SCHEMES), *((name, "none.masked") for name in list(SCHEMES)[:4])]
#: As for unquantized layers: the first projection's result and the output are rounded to bf16, and weight-only values
#: too. A bf16 result on the edge between two codes may take either, which the sums of a small layer show.
TOLERANCE = 1.2e-2
#: Neighbouring fp8 codes are up to an eighth apart.
FP8_TOLERANCE = 2.5e-2


def _request(quant: LayerQuant, **fields: Any) -> LayerRequest:
    sizes: dict[str, Any] = {"num_experts": 3, "top_k": 2, "hidden_size": 256, "intermediate_size": 128}
    return LayerRequest(quant=quant, runner_backend="triton", **(sizes | fields))


@pytest.mark.parametrize(("name", "a2a_backend"), CASES)
def test_scheme(name: str, a2a_backend: str) -> None:
    quant = SCHEMES[name]
    request = _request(quant, a2a_backend=a2a_backend, intermediate_size=192 if name.endswith("cut") else 128)
    tensors, meaning = random_quantized(request)
    hidden, _, weights = random_tokens(request, 4)
    ids = torch.tensor([[0, 2], [1, -1], [2, 1], [0, 1]])
    got = output(triton_layer(request, tensors), (hidden, ids, weights))
    tolerance = FP8_TOLERANCE if quant.w13.activation_dtype == "fp8" else TOLERANCE
    assert relative_error(got, exact_quantized((hidden, ids, weights), meaning)) < tolerance


@pytest.mark.parametrize("a2a_backend", ["none", "none.contiguous"])
@pytest.mark.parametrize("name", ["fp8_block128", "fp8_channel", "w8a8_int8", "fp8_tensor_static", "int8_row_static"])
def test_nan_stays_in_its_token_and_is_not_lost(name: str, a2a_backend: str) -> None:
    request = _request(SCHEMES[name], a2a_backend=a2a_backend)
    hidden, ids, weights = random_tokens(request, 3)[0], torch.tensor([[0, 2], [1, 0], [2, 1]]), torch.ones(3, 2)
    layer = triton_layer(request, random_quantized(request)[0])
    clean = output(layer, (hidden, ids, weights))
    hidden[1, 7] = torch.nan
    got = output(layer, (hidden, ids, weights))
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize("name", ["w8a8_int8", "int8_row_static"])
def test_weighted_inputs_are_rounded_once(name: str, module: bool) -> None:
    request = _request(SCHEMES[name], weight_on_input=True)
    if module:
        request = attrs.evolve(request, activation=ActivationSpec(kind="module"))
    seen = []

    def swiglu(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.dtype)
        return activate(hidden.double(), SWIGLU).to(hidden.dtype)

    tensors, meaning = random_quantized(request)
    raw = RawWeights(tensors=tensors, activation=swiglu if module else None)
    tokens = random_tokens(request, 4)
    want = exact_quantized(tokens, meaning, weight_on_input=True)
    # Rounded to bf16 before, 1.6 to 1.8 %; a model's callable gets bf16, which is one rounding more.
    tolerance = TOLERANCE if module else 6e-3
    assert relative_error(output(triton_layer(request, raw), tokens), want) < tolerance
    assert seen == [torch.bfloat16] * module


@pytest.mark.parametrize(
    ("card", "rows", "name"),
    [
        *((*entry, "w8a16_int8") for entry in fewest_rows("byte_weight")),
        *((*entry, "mxfp4_w4a16") for entry in fewest_rows("narrow")),
        ("H200", 1, "w4a16_int4_g32"),
        ("H100", 9, "mxfp8_w8a16"),
        ("H200", 25, "int8_groups"),
    ],
)
def test_every_tile_of_weights_beside_floats(card: str, rows: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_card(card, monkeypatch)
    request = _request(QUANTS[name], num_experts=2, top_k=1)
    tensors, meaning = random_quantized(request)
    tokens = random_tokens(request, 2 * rows)
    assert relative_error(output(triton_layer(request, tensors), tokens), exact_quantized(tokens, meaning)) < TOLERANCE


@pytest.mark.parametrize(("card", "rows"), fewest_rows("byte"))
def test_every_tile_of_8_bit_weights_beside_8_bit_rows(card: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_card(card, monkeypatch)
    request = _request(QUANTS["fp8_block128"], num_experts=2, top_k=1)
    tensors, meaning = random_quantized(request)
    tokens = random_tokens(request, 2 * rows)
    assert (
        relative_error(output(triton_layer(request, tensors), tokens), exact_quantized(tokens, meaning)) < FP8_TOLERANCE
    )


@pytest.mark.parametrize(
    ("w13", "w2", "operands"),
    [
        (BF16, BF16, "half"),
        (FP8_BLOCK128, W8A8_INT8, "byte"),
        (W8A16_INT8, FP8_BLOCK128_W8A16, "byte_weight"),
        (FP8_BLOCK128, FP8_BLOCK128_W8A16, "byte_weight"),
        (W4A16_INT4_G128, W8A16_INT8, "narrow"),
        (MXFP4_W4A16, MXFP4_W4A16, "narrow"),
        # A tile of the second takes two bytes per value.
        (W8A16_INT8, BF16, "narrow"),
    ],
)
def test_what_is_multiplied(w13: QuantScheme, w2: QuantScheme, operands: str) -> None:
    assert operands_of(w13, w2) == operands


@pytest.mark.error_path
@pytest.mark.parametrize("name", ["w13_scale", "w2_scale"])
@pytest.mark.parametrize(("size", "is_taken"), [(2.0**105, True), (2.0**106, False), (-math.inf, False)])
def test_scales_of_int4_that_its_kernels_do_not_take(name: str, size: float, is_taken: bool) -> None:
    request = _request(SCHEMES["w4a16_int4_g32"])
    tensors = random_quantized(request)[0]
    layer = triton_layer(request, dict(tensors))
    tensors[name][1, 2, 3] = size
    with nullcontext() if is_taken else pytest.raises(WeightsError, match=f"{name}: up to .*below 8.11e\\+31"):
        triton_layer(request, dict(tensors))
    with nullcontext() if is_taken else pytest.raises(WeightsError, match=f"{name}: up to .*below 8.11e\\+31"):
        layer.load_weights(RawWeights(tensors={key: tensor.to(DEVICE) for key, tensor in tensors.items()}))


@pytest.mark.parametrize("a2a_backend", ["none", "none.masked"])
@pytest.mark.parametrize("name", ["fp8_block128", "fp8_channel", "w8a8_int8", "int8_row_static"])
def test_what_is_between_the_projections_may_exceed_fp16(name: str, a2a_backend: str) -> None:
    request = _request(SCHEMES[name], dtype="fp16", a2a_backend=a2a_backend)
    tensors, meaning = random_quantized(request)
    for part, factor in (("w13_scale", 2.0**9), ("w2_scale", 2.0**-18)):
        tensors[part] *= factor
        meaning[part.partition("_")[0]] *= factor
    if "w2_input_scale" in tensors:
        tensors["w2_input_scale"] *= 2.0**18
        meaning["round_w2"] = rounding(request.quant.w2, tensors["w2_input_scale"])
    hidden, ids, weights = random_tokens(request, 3)[0], torch.tensor([[0, 2], [1, 0], [2, 1]]), torch.ones(3, 2)
    first = meaning["w13"][0] @ hidden[0].double()
    assert activate(first[None], SWIGLU).abs().max() > 2 * torch.finfo(torch.float16).max
    got = output(triton_layer(request, tensors), (hidden, ids, weights))
    tolerance = FP8_TOLERANCE if request.quant.w13.activation_dtype == "fp8" else TOLERANCE
    assert relative_error(got, exact_quantized((hidden, ids, weights), meaning)) < tolerance


@pytest.mark.parametrize("a2a_backend", ["none", "none.masked"])
@pytest.mark.parametrize("name", ["mxfp4_w4a16", "w4a16_int4_g32", "int4_row_zero", "fp8_row_weights"])
def test_what_is_between_weights_of_fewer_bits_may_exceed_fp16(name: str, a2a_backend: str) -> None:
    request = _request(SCHEMES[name], dtype="fp16", a2a_backend=a2a_backend)
    tensors, meaning = random_quantized(request)
    tokens = random_tokens(request, 3)[0] * 256, torch.tensor([[0, 2], [1, 0], [2, 1]]), torch.full((3, 2), 2.0**-9)
    first = meaning["w13"][0] @ tokens[0][0].double()
    assert 1.2 * torch.finfo(torch.float16).max < activate(first[None], SWIGLU).abs().max() < 1e6
    want = layer_in_float64(*tokens, meaning, SWIGLU)
    # Weights and rows are rounded to fp16.
    assert relative_error(output(triton_layer(request, tensors), tokens), want) < 1e-3


@pytest.mark.error_path
@pytest.mark.parametrize("name", ["mxfp4_w4a16", "w4a16_int4_g32", "int8_groups", "mxfp8_w8a16"])
def test_weights_that_fp16_does_not_hold(name: str) -> None:
    request = _request(QUANTS[name], dtype="fp16")
    tensors = random_quantized(request)[0]
    triton_layer(request, dict(tensors))
    scale = tensors["w2_scale"].clone()
    scale[1, 2, 0] = 127 + 15 if scale.dtype == torch.uint8 else 2.0**15
    with pytest.raises(WeightsError, match=r"w2: values up to .* in fp16, which ends at 65504"):
        triton_layer(request, {**tensors, "w2_scale": scale})
    triton_layer(attrs.evolve(request, dtype="bf16"), {**tensors, "w2_scale": scale})
