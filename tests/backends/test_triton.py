"""Layers on the Triton runners against float64: formats, options, ids, sharing, warm-up."""

from __future__ import annotations

import attrs
import pytest
import torch
from layers import exact, random_tensors, random_tokens
from oracle import TOLERANCE, activate, make_params, relative_error
from oracle import layer as exact_layer
from triton_layers import DEVICE, fewest_rows, output, pretend_card, triton_layer

from moe_core import LayerRequest, RawWeights
from moe_core.activation import RELU2, SWIGLU, ActivationSpec
from moe_core.errors import InputError
from moe_core.payloads import StandardTokens
from moe_core.quant import FP16

pytest.importorskip("triton", reason="needs triton")
from moe_core.backends.triton.tiles import TileTable
from moe_core.backends.triton.warm_up import token_counts, warm_up

LAYER = LayerRequest(
    num_experts=5, top_k=3, hidden_size=64, intermediate_size=48, runner_backend="triton", a2a_backend="none"
)
FORMATS = ("none", "none.standard", "none.contiguous", "none.masked")


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(31)


def _tokens(request: LayerRequest, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """No token names an expert twice, which the masked format has no room for on a GPU; some name fewer."""
    hidden, _, weights = random_tokens(request, num_tokens)
    ids = torch.rand(num_tokens, request.num_experts).topk(request.top_k).indices
    ids[::4, 1] = -1
    return hidden, ids, weights


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("a2a_backend", FORMATS)
def test_every_format(a2a_backend: str, num_tokens: int) -> None:
    request = attrs.evolve(LAYER, a2a_backend=a2a_backend, bias=True)
    tensors, tokens = random_tensors(request), _tokens(request, num_tokens)
    layer = triton_layer(request, tensors)
    assert layer.plan.routes[0].runner.plugin == "triton"
    assert relative_error(output(layer, tokens), exact(request, tensors, tokens)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("a2a_backend", ["none", "none.contiguous"])
def test_fp16_rows_may_exceed_its_largest_number(a2a_backend: str) -> None:
    request = attrs.evolve(LAYER, a2a_backend=a2a_backend, dtype="fp16", quant=FP16)
    tensors, (hidden, ids, weights) = random_tensors(request), _tokens(request, 6)
    tensors["w2"] *= 2.0**13
    tokens = hidden * 8, ids, weights * 2.0**-12
    got = output(triton_layer(request, tensors), tokens)
    assert relative_error(got, exact(request, tensors, tokens)) < 2 * TOLERANCE[torch.float16]


@pytest.mark.parametrize("a2a_backend", ["none", "none.contiguous", "none.masked"])
@pytest.mark.parametrize("activation", [SWIGLU, ActivationSpec(kind="gelu", beta=1.0), RELU2], ids=str)
def test_what_is_between_the_projections_may_exceed_fp16(activation: ActivationSpec, a2a_backend: str) -> None:
    more = {"a2a_backend": a2a_backend, "activation": activation, "bias": True}
    request = attrs.evolve(LAYER, dtype="fp16", quant=FP16, **more)
    tensors, (hidden, ids, weights) = random_tensors(request), _tokens(request, 6)
    tensors["w2"] *= 2.0**-9
    tokens = hidden * 100, ids, weights
    rows = [tensors["w13"][e].double() @ tokens[0][t].double() for t, e in enumerate(ids[:, 0])]
    largest = activate(torch.stack(rows), activation).abs().max()
    assert 1.2 * torch.finfo(torch.float16).max < largest < 1e6
    got = output(triton_layer(request, tensors), tokens)
    assert relative_error(got, exact_layer(*tokens, tensors, activation)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("a2a_backend", ["none", "none.contiguous"])
def test_a_models_callable_may_exceed_fp16(a2a_backend: str) -> None:
    activation = ActivationSpec(kind="module")
    request = attrs.evolve(LAYER, dtype="fp16", quant=FP16, a2a_backend=a2a_backend, activation=activation)
    tensors, (hidden, ids, weights) = random_tensors(request), _tokens(request, 6)
    tensors["w2"] *= 2.0**-14
    # What it is given, and what it gives, for all tokens but the first.
    tokens = torch.cat([hidden[:1], hidden[1:] * 20000]), ids, weights

    def roots(h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return 6.0 * gate.abs().sqrt() * up.abs().sqrt()

    raw = RawWeights(tensors=dict(tensors), activation=roots)
    first = torch.einsum("enh,th->ten", tensors["w13"].double(), tokens[0].double()).flatten(0, 1)
    assert first.abs().max() > 2 * torch.finfo(torch.float16).max
    assert 1.2 * torch.finfo(torch.float16).max < roots(first).abs().max() < 1e6
    want = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, slot in (ids >= 0).nonzero().tolist():
        expert = ids[token, slot]
        h = tensors["w13"][expert].double() @ tokens[0][token].double()
        want[token] += weights[token, slot].double() * (tensors["w2"][expert].double() @ roots(h))
    got = output(triton_layer(request, raw), tokens)
    for token in range(6):
        assert relative_error(got[token], want[token]) < 2 * TOLERANCE[torch.float16]


@pytest.mark.parametrize("size", [1e-3, 1e-1])
def test_small_numbers_between_the_projections_are_as_near_in_fp16(size: float) -> None:
    request = attrs.evolve(LAYER, dtype="fp16", quant=FP16, hidden_size=256, intermediate_size=128)
    tensors, tokens = random_tensors(request), _tokens(request, 6)
    tensors["w13"][:, 128:] *= size
    rows = torch.einsum("enh,th->ten", tensors["w13"].double(), tokens[0].double()).flatten(0, 1)
    assert 0.5 * size < activate(rows, SWIGLU).square().mean().sqrt() < 2 * size
    got = output(triton_layer(request, tensors), tokens)
    assert relative_error(got, exact(request, tensors, tokens)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(("expected_m", "rows"), [(None, 9 * 3 / 5), (1, 1), (300, 300)])
def test_a_dispatcher_says_how_many_rows_an_expert_has(
    expected_m: int | None, rows: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, tokens = random_tensors(LAYER), _tokens(LAYER, 9)
    layer, asked = triton_layer(attrs.evolve(LAYER, a2a_backend="none.standard"), tensors), []
    choose = TileTable.choose
    monkeypatch.setattr(TileTable, "choose", lambda table, found: asked.append(found) or choose(table, found))
    experts = layer._bound.routes[0].experts
    hidden, ids, weights = (tensor.to(DEVICE) for tensor in tokens)
    sent = StandardTokens(hidden_states=hidden, topk_ids=ids, topk_weights=weights, expected_m=expected_m)
    # The hint changes no value.
    assert relative_error(experts(sent).cpu(), exact(LAYER, tensors, tokens)) < TOLERANCE[torch.bfloat16]
    assert asked == [rows]


@pytest.mark.parametrize(("card", "rows"), fewest_rows("half"))
def test_every_tile_of_a_card(card: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_card(card, monkeypatch)
    request = attrs.evolve(LAYER, num_experts=2, top_k=1)
    tensors = random_tensors(request)
    tokens = random_tokens(request, 2 * rows)
    want = exact(request, tensors, tokens)
    assert relative_error(output(triton_layer(request, tensors), tokens), want) < TOLERANCE[torch.bfloat16]


def test_router_weights_on_the_input() -> None:
    request = attrs.evolve(LAYER, weight_on_input=True)
    tensors, tokens = random_tensors(request), _tokens(request, 5)
    assert relative_error(output(triton_layer(request, tensors), tokens), exact(request, tensors, tokens)) < 1e-2


def test_a_models_own_activation_and_norm() -> None:
    request = attrs.evolve(LAYER, activation=ActivationSpec(kind="module"), post_norm=True)
    params = make_params(5, 64, 48, torch.bfloat16) | {"post_norm": lambda rows: rows / 2}
    raw = RawWeights(
        tensors={name: params[name] for name in ("w13", "w2")},
        activation=lambda h: torch.nn.functional.silu(h[:, :48]) * h[:, 48:],
        post_norm=params["post_norm"],
    )
    tokens = _tokens(request, 5)
    # The whole result of the first projection is rounded once more than inside a kernel.
    assert relative_error(output(triton_layer(request, raw), tokens), exact_layer(*tokens, params, SWIGLU)) < 1.2e-2


@pytest.mark.parametrize("a2a_backend", FORMATS)
def test_no_tokens_and_no_experts_for_any(a2a_backend: str) -> None:
    request = attrs.evolve(LAYER, a2a_backend=a2a_backend)
    layer = triton_layer(request, random_tensors(request))
    hidden, ids, weights = _tokens(request, 3)
    assert output(layer, (hidden[:0], ids[:0], weights[:0])).shape == (0, 64)
    assert (output(layer, (hidden, torch.full_like(ids, -1), weights)) == 0).all()
    assert (output(layer, (hidden[:1], torch.full_like(ids[:1], -1), weights[:1])) == 0).all()


def test_idle_experts_full_of_nan_do_not_matter() -> None:
    tensors, (hidden, ids, weights) = random_tensors(LAYER), _tokens(LAYER, 9)
    ids = ids.clamp(max=2)
    want = exact(LAYER, tensors, (hidden, ids, weights))
    for tensor in tensors.values():
        tensor[3:] = torch.nan
    assert relative_error(output(triton_layer(LAYER, tensors), (hidden, ids, weights)), want) < 8e-3


@pytest.mark.error_path
@pytest.mark.skipif(DEVICE == "cuda", reason="a device-side assertion would end the process")
@pytest.mark.parametrize("bad", [5, -2])
def test_ids_out_of_range(bad: int) -> None:
    layer, (hidden, ids, weights) = triton_layer(LAYER, random_tensors(LAYER)), _tokens(LAYER, 2)
    ids[1, 2] = bad
    with pytest.raises(InputError, match=f"expert id {bad} is out of range"):
        layer(hidden, ids, weights)


def test_a_reload_reaches_the_kernels() -> None:
    layer, tokens = triton_layer(LAYER, random_tensors(LAYER)), _tokens(LAYER, 40)
    output(layer, tokens)
    fresh = random_tensors(LAYER, seed=7)
    layer.load_weights(RawWeights(tensors={name: tensor.to(DEVICE) for name, tensor in fresh.items()}))
    assert relative_error(output(layer, tokens), exact(LAYER, fresh, tokens)) < TOLERANCE[torch.bfloat16]


def test_warm_up_says_how_far_it_is() -> None:
    layer, seen = triton_layer(LAYER, random_tensors(LAYER)), []
    assert layer._bound is not None
    warm_up(layer._bound, max_tokens=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert token_counts(8) == [1, 2, 4, 8]
