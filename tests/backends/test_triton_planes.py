"""Layers of int4 weights whose codes are decoded in planes: what they compute, and which layers do it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from layers import random_tokens
from oracle import relative_error
from quantized import QUANTS, exact_quantized, random_quantized
from triton_layers import fewest_rows, output, pretend_card, triton_layer

from moe_core import LayerRequest, RawWeights
from moe_core.activation import SWIGLU, SWIGLU_OAI, ActivationSpec

pytest.importorskip("triton", reason="needs triton")
from moe_core.backends.triton import experts
from moe_core.kernels.activation import activate

LAYER = LayerRequest(
    num_experts=3,
    top_k=2,
    hidden_size=256,
    intermediate_size=128,
    quant=QUANTS["w4a16_int4_g128"],
    runner_backend="triton.fused",
    a2a_backend="none",
)
#: bf16 operands and one rounding of the result of each projection.
TOLERANCE = 6e-3


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the rows that were put in the order of planes by a launch of their own."""
    shapes: list[tuple[int, ...]] = []
    real = experts.rows_in_planes
    monkeypatch.setattr(
        experts, "rows_in_planes", lambda rows, **more: shapes.append((*rows.shape,)) or real(rows, **more)
    )
    return shapes


@pytest.mark.parametrize("name", ["w4a16_int4", "w4a16_int4_g128", "w4a16_int4_asym_g128"])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_results(name: str, num_tokens: int, ordered: list[tuple[int, ...]]) -> None:
    request = attrs.evolve(LAYER, quant=QUANTS[name])
    tensors, meaning = random_quantized(request)
    tokens = random_tokens(request, num_tokens)
    assert relative_error(output(triton_layer(request, tensors), tokens), exact_quantized(tokens, meaning)) < TOLERANCE
    # The first projection's kernel writes its result in that order.
    assert ordered == [(num_tokens, 256)]


@pytest.mark.parametrize(("card", "rows"), fewest_rows("planes"))
def test_every_tile(card: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_card(card, monkeypatch)
    request = attrs.evolve(LAYER, num_experts=2, top_k=1)
    tensors, meaning = random_quantized(request)
    tokens = random_tokens(request, 2 * rows)
    assert relative_error(output(triton_layer(request, tensors), tokens), exact_quantized(tokens, meaning)) < TOLERANCE


@pytest.mark.parametrize("activation", [SWIGLU_OAI, ActivationSpec(kind="gelu", row_order="interleaved")], ids=str)
def test_activations(activation: ActivationSpec, ordered: list[tuple[int, ...]]) -> None:
    request = attrs.evolve(LAYER, activation=activation)
    tensors, meaning = random_quantized(request)
    tokens = random_tokens(request, 7)
    got = output(triton_layer(request, tensors), tokens)
    assert relative_error(got, exact_quantized(tokens, meaning, activation=activation)) < TOLERANCE
    assert ordered == [(7, 256)]


def test_a_models_own_activation(ordered: list[tuple[int, ...]]) -> None:
    request = attrs.evolve(LAYER, activation=ActivationSpec(kind="module"))
    tensors, meaning = random_quantized(request)
    tokens = random_tokens(request, 7)
    raw = RawWeights(tensors=tensors, activation=lambda hidden: activate(hidden, SWIGLU))
    # The whole result of the first projection is rounded once more than inside a kernel.
    got = output(triton_layer(request, raw), tokens)
    assert relative_error(got, exact_quantized(tokens, meaning)) < 1.2e-2
    assert ordered == [(7, 256), (14, 128)]


def test_weighted_inputs(ordered: list[tuple[int, ...]]) -> None:
    request = attrs.evolve(LAYER, weight_on_input=True)
    tensors, meaning = random_quantized(request)
    tokens = random_tokens(request, 7)
    got = output(triton_layer(request, tensors), tokens)
    # Weighted tokens are rounded to bf16 before the product.
    assert relative_error(got, exact_quantized(tokens, meaning, weight_on_input=True)) < 1.2e-2
    assert ordered == [(14, 256)]


@pytest.mark.parametrize(
    "fields",
    [
        {"quant": QUANTS["w4a16_int4_g32"]},
        {"quant": QUANTS["mxfp4_w4a16"]},
        {"intermediate_size": 192, "quant": QUANTS["w4a16_int4"]},
        {"dtype": "fp16"},
        {"runner_backend": "triton.masked", "a2a_backend": None},
    ],
    ids=["groups of 32", "e2m1", "half a step", "fp16", "blocks of rows"],
)
def test_other_layers_move_codes(fields: dict[str, Any], ordered: list[tuple[int, ...]]) -> None:
    request = attrs.evolve(LAYER, **fields)
    tensors, meaning = random_quantized(request)
    tokens = random_tokens(request, 7)
    assert relative_error(output(triton_layer(request, tensors), tokens), exact_quantized(tokens, meaning)) < TOLERANCE
    assert ordered == []
