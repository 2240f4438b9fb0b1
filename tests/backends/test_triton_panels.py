"""Layers whose weights lie in panels: what they compute, and from what they are made."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from layers import random_tokens
from oracle import TOLERANCE, make_params, make_tokens, relative_error
from oracle import layer as exact_layer
from quantized import QUANTS, exact_quantized, random_quantized
from triton_layers import DEVICE, both_manager, output, triton_layer

from moe_core import LayerRequest, RawWeights
from moe_core.activation import RELU2, SWIGLU, SWIGLU_OAI, ActivationSpec
from moe_core.environment import load_environment
from moe_core.errors import ResolutionError
from moe_core.measurements import MeasurementTable
from moe_core.planner import make_plan

pytest.importorskip("triton", reason="needs triton")
from moe_core.backends.triton.tiles import MEASURED_IN_PANELS
from moe_core.backends.triton.weights import Projection
from moe_core.kernels.triton.gemm import GroupedGemm

LAYER = LayerRequest(
    num_experts=3,
    top_k=2,
    hidden_size=128,
    intermediate_size=384,
    bias=True,
    runner_backend="triton.fused_panels",
    a2a_backend="none",
)
INTERLEAVED = ActivationSpec(kind="gelu_tanh", row_order="interleaved")


def _params(request: LayerRequest) -> dict[str, torch.Tensor]:
    sizes = request.num_experts, request.hidden_size, request.intermediate_size
    return make_params(*sizes, torch.bfloat16, gated=request.activation.gated, bias=True)


@pytest.mark.parametrize("activation", [SWIGLU_OAI, INTERLEAVED, RELU2], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_results(num_tokens: int, activation: ActivationSpec) -> None:
    request = attrs.evolve(LAYER, activation=activation)
    params, tokens = _params(request), make_tokens(num_tokens, 128, 3, 2, torch.bfloat16)
    tokens[1][::3, 1] = -1
    layer = triton_layer(request, {name: params[name] for name in ("w13", "b13", "w2", "b2")})
    assert relative_error(output(layer, tokens), exact_layer(*tokens, params, activation)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", ["fp8_block128", "fp8_channel", "w8a8_int8", "fp8_tensor_static"])
def test_8_bits_on_both_sides(name: str) -> None:
    request = attrs.evolve(LAYER, quant=QUANTS[name], bias=False)
    tensors, meaning = random_quantized(request)
    tokens = random_tokens(request, 40)
    assert relative_error(output(triton_layer(request, tensors), tokens), exact_quantized(tokens, meaning)) < 2.5e-2


def _layers(operands: str) -> list[tuple[int, int]]:
    """Experts, and tokens of one expert each, that between them get every entry of the table."""
    bounds = pairwise((0, *MEASURED_IN_PANELS[operands]))
    return [(16, 1) if most < 1 else (2, 2 * (int(less) + 1)) for less, most in bounds]


@pytest.mark.parametrize(("experts", "num_tokens"), _layers("half"))
def test_every_tile(experts: int, num_tokens: int) -> None:
    request = attrs.evolve(LAYER, num_experts=experts, top_k=1)
    params, tokens = _params(request), make_tokens(num_tokens, 128, experts, 1, torch.bfloat16)
    layer = triton_layer(request, {name: params[name] for name in ("w13", "b13", "w2", "b2")})
    assert relative_error(output(layer, tokens), exact_layer(*tokens, params, SWIGLU)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("experts", "num_tokens"), _layers("byte"))
def test_every_tile_of_8_bits(experts: int, num_tokens: int) -> None:
    request = attrs.evolve(LAYER, num_experts=experts, top_k=1, quant=QUANTS["fp8_block128"], bias=False)
    tensors, meaning = random_quantized(request)
    tokens = random_tokens(request, num_tokens)
    assert relative_error(output(triton_layer(request, tensors), tokens), exact_quantized(tokens, meaning)) < 2.5e-2


def test_a_models_own_activation_gets_the_order_that_it_knows() -> None:
    request = attrs.evolve(LAYER, activation=ActivationSpec(kind="module"))
    params, tokens = _params(LAYER), make_tokens(5, 128, 3, 2, torch.bfloat16)
    halves = lambda h: torch.nn.functional.silu(h[:, :384]) * h[:, 384:]  # noqa: E731
    raw = RawWeights(tensors={name: params[name] for name in ("w13", "b13", "w2", "b2")}, activation=halves)
    # The whole result of the first projection is rounded once more than inside a kernel.
    assert relative_error(output(triton_layer(request, raw), tokens), exact_layer(*tokens, params, SWIGLU)) < 1.2e-2


def test_they_are_copies_and_a_reload_reaches_them() -> None:
    params, fresh, tokens = _params(LAYER), _params(LAYER), make_tokens(9, 128, 3, 2, torch.bfloat16)
    released: list[int] = []
    names = ("w13", "b13", "w2", "b2")
    tensors = {name: params[name].clone().to(DEVICE) for name in names}

    def release(expert: int) -> None:
        released.append(expert)
        for tensor in tensors.values():
            tensor[expert].fill_(torch.nan)

    layer = triton_layer(LAYER, RawWeights(tensors=tensors, release=release))
    assert released == [0, 1, 2]
    assert relative_error(output(layer, tokens), exact_layer(*tokens, params, SWIGLU)) < TOLERANCE[torch.bfloat16]
    layer.load_weights(RawWeights(tensors={name: fresh[name].to(DEVICE) for name in names}))
    assert relative_error(output(layer, tokens), exact_layer(*tokens, fresh, SWIGLU)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"intermediate_size": 192}, "intermediate_size multiple_of 128"),
        ({"quant": QUANTS["mxfp4_w4a16"]}, "fused_panels: scheme"),
        ({"ep_size": 2, "num_experts": 4, "a2a_backend": None}, "ep_size"),
    ],
    ids=["half a panel", "4 bits", "ranks"],
)
def test_what_does_not_fit(fields: dict[str, Any], why: str) -> None:
    request = attrs.evolve(LAYER, bias=False, **fields)
    with pytest.raises(ResolutionError, match=why):
        make_plan(both_manager(), request, load_environment("h100"), MeasurementTable())


# Both roundings are launches, or only that of tokens: each has rows, codes and scales.
@pytest.mark.parametrize(("name", "num_tensors"), [("fp8_tensor_static", 6), ("fp8_block128", 3)])
def test_what_is_read_in_front_is_kept_until_the_second_projection_is_launched(
    name: str, num_tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that waits for its own rows writes while they are read, and must not get their memory.
    request = attrs.evolve(LAYER, quant=QUANTS[name], bias=False)
    tensors, _ = random_quantized(request)
    read: list[weakref.ref[torch.Tensor]] = []
    awaited: list[int] = []
    rounded, multiply = Projection.rounded, GroupedGemm.__call__

    def recorded(self: Projection, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = rounded(self, rows, *args, **kwargs)
        read.extend(map(weakref.ref, (rows, *found)))
        return found

    def looked_at(self: GroupedGemm, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("awaited"):
            awaited.append(kwargs["awaited"])
            assert len(read) == num_tensors
            assert all(reference() is not None for reference in read)
        return multiply(self, *args, **kwargs)

    monkeypatch.setattr(Projection, "rounded", recorded)
    monkeypatch.setattr(GroupedGemm, "__call__", looked_at)
    output(triton_layer(request, tensors), random_tokens(request, 5))
    assert awaited


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiler_that_plans_memory_gets_no_launch_that_overtakes(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, tokens, multiply = _params(LAYER), make_tokens(5, 128, 3, 2, torch.bfloat16), GroupedGemm.__call__
    awaited: list[int] = []

    def recorded(self: GroupedGemm, *args: Any, **kwargs: Any) -> torch.Tensor:
        awaited.append(kwargs.get("awaited", 0))
        return multiply(self, *args, **kwargs)

    monkeypatch.setattr(GroupedGemm, "__call__", recorded)
    layer = triton_layer(LAYER, {name: params[name] for name in ("w13", "b13", "w2", "b2")})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    got = output(layer, tokens)
    assert (max(awaited) > 0) is not compiled
    assert relative_error(got, exact_layer(*tokens, params, SWIGLU)) < TOLERANCE[torch.bfloat16]
