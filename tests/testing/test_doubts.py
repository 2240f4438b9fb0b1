"""Codes in doubt: a right layer that rounds otherwise passes whatever was drawn, and a fault beside them shows."""

from __future__ import annotations

import pytest
import torch
from right_forward import STYLES, right_forward

from moe_core import LayerRequest
from moe_core.quant import MXFP8, NVFP4, SCHEMES, W8A8_INT8, LayerQuant
from moe_core.testing import stored as drawing
from moe_core.testing.compare import layer_error, layer_mismatch, mismatch, relative_error
from moe_core.testing.doubts import nearest_answer
from moe_core.testing.reference import by_expert
from moe_core.testing.rounding import activation_rounder
from moe_core.testing.sizes import base_sizes
from moe_core.testing.stored import DrawnLayer, draw_layer
from moe_core.testing.tolerance import tolerance

#: Schemes whose activations have one answer for each token.
ROUNDED = [name for name, s in SCHEMES.items() if s.activation_dtype != "same" and not s.scales_by_batch]
#: What activations are calibrated for, of what the kit takes.
CALIBRATIONS = (0.5, 1.0004, 1.9)
#: Layers of each scheme.
_LAYERS = 12
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> tuple[LayerRequest, DrawnLayer, Tokens]:
    """One token of a layer that is drawn anew for each index; every other one is small."""
    quant = LayerQuant.of(SCHEMES[name])
    sizes = base_sizes(quant, ())
    hidden, inner = (sizes.hidden_size, sizes.intermediate_size) if index % 2 else (18, 18)
    request = LayerRequest(num_experts=4, top_k=1 + index % 3, hidden_size=hidden, intermediate_size=inner, quant=quant)
    factor = CALIBRATIONS[index % len(CALIBRATIONS)]
    monkeypatch.setattr(drawing, "_CALIBRATED", {"w13": 4.1484 * factor, "w2": 12.4452 * factor})
    generator = torch.Generator().manual_seed(index)
    token = torch.randn(1, hidden, generator=generator).bfloat16()
    ids = torch.rand(1, 4, generator=generator).topk(request.top_k, dim=1).indices
    # Another seed for each index: draws are kept by their arguments, which the calibration is none of.
    return (
        request,
        draw_layer(request, seed=900 + index),
        (token, ids, torch.rand(ids.shape, generator=generator) + 0.2),
    )


@pytest.mark.parametrize("name", ROUNDED)
def test_what_rounds_otherwise_is_right_and_what_is_wrong_beside_it_shows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {"all": 0, "one": 0}
    for index in range(_LAYERS):
        request, stored, tokens = drawn(name, index, monkeypatch)
        limit = tolerance(request)
        output = right_forward(stored, request, tokens, STYLES[index // 2 % len(STYLES)])
        assert layer_error(output, stored.reference, tokens, limit) < 0.6 * limit
        assert layer_mismatch(output, stored.reference, tokens, limit) is None
        spoilt = output.clone()
        spoilt[0, 3] += output.norm() / request.hidden_size**0.5
        seen["all"] += layer_mismatch(output * 1.25, stored.reference, tokens, limit) is not None
        seen["one"] += layer_mismatch(spoilt, stored.reference, tokens, limit) is not None
    # In half of the layers one token has 18 values per slot: where the largest of them is in doubt, much fits.
    assert min(seen.values()) >= _LAYERS - 2, seen


def test_without_doubts_right_layers_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = 0
    for index in range(12):
        request, stored, tokens = drawn("nvfp4", index, monkeypatch)
        output = right_forward(stored, request, tokens, STYLES[0])
        failed += mismatch(output, stored.reference(*tokens), tolerance(request)) is not None
    assert failed > 2


def test_a_layer_without_rounded_activations_has_no_doubts() -> None:
    request = LayerRequest(num_experts=4, top_k=2, hidden_size=64, intermediate_size=48)
    layer = draw_layer(request).reference
    tokens = torch.randn(3, 64), torch.tensor([[0, 1], [-1, 2], [-1, -1]]), torch.rand(3, 2)
    assert torch.equal(nearest_answer(layer, tokens, torch.ones(3, 64), tolerance(request)), layer(*tokens))


def test_a_slot_of_weight_zero_has_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    request, stored, (hidden, ids, _) = drawn("nvfp4", 1, monkeypatch)
    tokens = hidden, ids, torch.zeros(ids.shape)
    assert not nearest_answer(stored.reference, tokens, torch.ones(hidden.shape), tolerance(request)).any()


def test_a_value_between_two_codes_is_in_doubt_and_others_are_not() -> None:
    rows = torch.tensor([[127.0, 10.49999, 10.4, -3.50001]], dtype=torch.float64)
    down, up = activation_rounder(W8A8_INT8, None).doubts(rows, [0], rows.abs() * 1e-5)
    assert down.tolist() == [[0, 0, 0, 0]]
    assert up.tolist() == [[0, 1, 0, 1]]


def test_a_scale_between_two_leaves_its_group_in_doubt() -> None:
    rows = torch.full((1, 64), 0.005, dtype=torch.float64)
    # The largest value over 448 is a power of two; of the second group it is not.
    rows[0, 0], rows[0, 32] = 448.0, 440.0
    down, up = activation_rounder(MXFP8, None).doubts(rows, [0], rows * 1e-6)
    assert (up > down)[0, :32].any()
    assert not (up > down)[0, 32:].any()
    unit = torch.tensor([1.0 / 448])
    down, up = activation_rounder(NVFP4, unit).doubts(
        rows[:, :16] / 448 * 6 * 1.0625 / 448, [0], torch.full((1, 16), 1e-9)
    )
    assert (up > down).any()


def test_every_combination_of_codes_in_doubt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stored, tokens = drawn("fp8_tensor_static", 3, monkeypatch)
    layer, slots = stored.reference, stored.reference.slots(*tokens)
    a = layer.activated(by_expert(layer.round1(slots.tokens, slots.experts), layer.w13, None, slots.experts))
    # Some codes are others after a change of each value by a part of a step.
    signs = torch.randint(0, 2, a.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rows = by_expert(layer.round2(a * (1 + 0.004 * signs), slots.experts), layer.w2, None, slots.experts)
    output = layer.finished(rows, slots).sum(0, keepdim=True)
    assert relative_error(output, layer(*tokens)) > 0.005
    # The search stops at a quarter of the tolerance.
    assert layer_error(output, layer, tokens, 0.01) < 0.003
