"""Scalars against float64: what kernels compute with them is what the checkpoint means, or its experts are named."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laid_out import EXPERTS, SmallLayer, any_raw, small_layer
from moe_plugin_flashinfer.scalars import (
    Calibration,
    can_share,
    is_linear_in_up,
    masked_scalars,
    one_for_all,
    shared_halves,
    wrapper_scalars,
)

from moe_core.activation import GEGLU, RELU2, SWIGLU, SWIGLU_OAI, ActivationSpec
from moe_core.errors import WeightsError
from moe_core.payloads import PreparedWeights
from moe_core.testing.formats import decode_e4m3

#: fp32 scalars move a block scale or a code that lies next to the middle of two; of powers of two they move nothing.
NEAR, EXACT = 2e-3, 1e-12


def powers_of_two(layer: SmallLayer, halves: list[list[float]]) -> dict[str, torch.Tensor]:
    """Raw weights whose scalars fp32 can invert."""
    return layer.raw(
        w13_global_scale=torch.tensor(halves),
        w2_global_scale=torch.tensor([0.25, 0.5, 1.0]) / 64,
        w13_input_scale=torch.full((EXPERTS,), 2.0**-9),
        w2_input_scale=torch.full((EXPERTS,), 2.0**-8),
    )


@pytest.mark.parametrize("activation", [SWIGLU, RELU2], ids=str)
def test_masked_scalars_give_the_answer_by_expert(activation: ActivationSpec) -> None:
    layer = small_layer("masked", activation=activation)
    tensors = layer.raw()
    for name in ("w13_input_scale", "w2_input_scale"):
        tensors[name] *= torch.tensor([1.0, 0.3, 2.0])
    assert layer.error(tensors, layer.prepare(tensors)) < NEAR


def test_wrapper_scalars_give_the_answer() -> None:
    layer = small_layer("wrapper")
    tensors = layer.raw()
    assert layer.error(tensors, layer.prepare(tensors)) < NEAR


@pytest.mark.parametrize("kernel", ["masked", "wrapper"])
@pytest.mark.parametrize("ratio", [0.25, 1.0, 2.0])
def test_halves_with_global_scales_of_their_own_are_exact(kernel: str, ratio: float) -> None:
    layer = small_layer(kernel)
    tensors = powers_of_two(layer, [[2.0**-6, ratio * 2.0**-6]] * EXPERTS)
    assert layer.error(tensors, layer.prepare(tensors)) < EXACT


def test_the_masked_fold_keeps_every_code() -> None:
    """Of any ratio: `(h / r) * r` is rounded as `h` is."""
    ratio, scale = torch.tensor([3.0, 0.3, 1.7], dtype=torch.float64), torch.tensor([0.01, 0.02, 0.5]).double()
    halves = torch.stack([torch.ones(3), ratio], dim=1)
    calibration = Calibration(x_input=scale, hidden_input=scale, halves=halves, w2_global=torch.ones(3).double())
    found = masked_scalars(calibration, SWIGLU, tokens_arrive_rounded=False)
    assert torch.equal(found.hidden_scale, (ratio / scale).float())
    # What the second GEMM's sums are scaled back by does not know of the ratio.
    assert torch.allclose(found.w2_alpha, scale.float(), rtol=1e-6)
    assert torch.allclose(found.w13_alpha, scale.float(), rtol=1e-6)


def error_with(layer: SmallLayer, tensors: dict[str, torch.Tensor], **changed: torch.Tensor) -> float:
    """The error of a layer with some prepared scalars replaced."""
    prepared: PreparedWeights = layer.prepare(tensors)
    for name, value in changed.items():
        prepared[name].copy_(value)
    return layer.error(tensors, prepared)


@pytest.mark.parametrize("kernel", ["masked", "wrapper"])
def test_wrong_scalars_give_wrong_numbers(kernel: str) -> None:
    layer = small_layer(kernel)
    tensors = layer.raw()
    if kernel == "masked":
        tensors["w13_input_scale"] *= torch.tensor([1.0, 0.3, 2.0])
    good = layer.prepare(tensors)
    scale, halves = tensors["w13_input_scale"], tensors["w13_global_scale"]
    planted = {
        "alpha of the up half": {"w13_alpha": scale * halves.amin(1)},
        "input scale inverted": {"x_scale": 1 / good["x_scale"]},
        "scale of the activation inverted": {"hidden_scale": 1 / good["hidden_scale"]},
        "global scale inverted": {"w2_alpha": tensors["w2_input_scale"] / tensors["w2_global_scale"]},
        "alpha of another expert": {"w2_alpha": good["w2_alpha"].roll(1)},
    }
    if kernel == "masked":
        planted["the gate's scale for both halves"] = {"hidden_scale": 1 / tensors["w2_input_scale"]}
        planted["the largest input scale for all"] = {"x_scale": 1 / scale.max().expand(EXPERTS)}
    errors = {name: error_with(layer, tensors, **changed) for name, changed in planted.items()}
    assert min(errors.values()) > 0.05, errors


def test_what_is_linear_in_up() -> None:
    assert all(map(is_linear_in_up, (SWIGLU, GEGLU, RELU2, ActivationSpec(alpha=1.702))))
    others = (SWIGLU_OAI, ActivationSpec(limit=7.0), ActivationSpec(beta=1.0), ActivationSpec(kind="module"))
    assert not any(map(is_linear_in_up, others))


@pytest.mark.error_path
def test_halves_that_differ_are_refused_where_the_activation_is_not_linear_in_up() -> None:
    calibration = Calibration.of(any_raw(small_layer("masked").request))
    with pytest.raises(WeightsError, match=r"not linear in up.*\n.*local experts \[0, 1, 2\]"):
        masked_scalars(calibration, ActivationSpec(limit=7.0), tokens_arrive_rounded=False)


@pytest.mark.error_path
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["w13_input_scale", "w2_input_scale", "w13_global_scale", "w2_global_scale"])
def test_unusable_scalars_name_their_experts(name: str, value: float) -> None:
    layer = small_layer("masked")
    tensors = layer.raw()
    tensors[name][[0, 2]] = value
    word = {"0.0": "zero", "-1.0": "negative"}.get(str(value), "not finite")
    with pytest.raises(WeightsError, match=rf"{name}: {word} for local experts \[0, 2\]"):
        layer.prepare(tensors)


@pytest.mark.error_path
def test_everything_that_is_missing_or_unusable_is_listed() -> None:
    layer = small_layer("wrapper")
    tensors = layer.raw()
    del tensors["w13_input_scale"]
    tensors["w2_input_scale"][1] = 0
    with pytest.raises(WeightsError) as caught:
        layer.prepare(tensors)
    missing, zero = caught.value.problems
    assert missing == "w13_input_scale: missing for all 3 experts"
    assert zero == "w2_input_scale: zero for local experts [1]"


@pytest.mark.error_path
def test_scalars_beyond_fp32_name_their_experts() -> None:
    layer = small_layer("masked")
    tensors = layer.raw()
    tensors["w2_input_scale"][1], tensors["w2_global_scale"][1] = 1e-30, 1e-30
    with pytest.raises(WeightsError, match=r"range of fp32.*\n.*w2_alpha: zero for local experts \[1\]"):
        layer.prepare(tensors)


@pytest.mark.error_path
@pytest.mark.parametrize("name", ["w13_input_scale", "w2_input_scale"])
def test_the_wrapper_wants_one_input_scale(name: str) -> None:
    layer = small_layer("wrapper")
    tensors = layer.raw()
    tensors[name][1] *= 0.5
    with pytest.raises(WeightsError, match=rf"{name}.*local experts \[1\] differ from the largest"):
        layer.prepare(tensors)


@pytest.mark.error_path
def test_tokens_that_arrive_rounded_want_one_input_scale() -> None:
    calibration = Calibration.of(any_raw(small_layer("masked").request))
    with pytest.raises(WeightsError, match="w13_input_scale: tokens are dispatched as nvfp4"):
        masked_scalars(calibration, SWIGLU, tokens_arrive_rounded=True)


def test_a_rank_without_experts_has_no_scale() -> None:
    assert one_for_all("w13_input_scale", torch.ones(0), "").shape == (0,)
    raw = {name: tensor[:0] for name, tensor in any_raw(small_layer("wrapper").request).items()}
    assert wrapper_scalars(Calibration.of(raw)).w13_alpha.shape == (0,)


def all_scales() -> torch.Tensor:
    """Every finite number of e4m3, as both halves of an expert."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]
    return torch.stack([codes, codes]).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("halves", [[1.0, 1.0], [3.0, 3.0]])
def test_equal_halves_keep_their_block_scales(halves: list[float]) -> None:
    scale, shared = all_scales(), torch.tensor(halves).double()
    assert can_share(scale, shared)
    assert torch.equal(shared_halves(scale, shared).view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize(("halves", "smallest"), [([1.0, 0.5], 2.0**-8), ([0.125, 0.5], 2.0**-7)])
def test_powers_of_two_go_into_the_block_scales_of_the_smaller_half(halves: list[float], smallest: float) -> None:
    factors = torch.tensor(halves).double()
    scale = all_scales()
    # Products of the smallest numbers are below the smallest: one such number, and the expert is refused.
    assert not can_share(scale, factors)
    values = decode_e4m3(scale)
    kept = scale.view(torch.uint8).where((values.abs() >= 2.0**-3) | (values == 0), 0).view(scale.dtype)
    assert can_share(kept, factors)
    means = decode_e4m3(shared_halves(kept, factors)) * factors.max()
    assert torch.equal(means, decode_e4m3(kept) * factors[:, None])
    # The larger half stays as it is, so that it may hold the smallest number.
    edge = torch.full((2, 1), 2.0**-9)
    for value, can in ((smallest, True), (smallest / 2, False)):
        edge[int(factors.argmin())] = value
        assert can_share(edge.to(scale.dtype), factors) is can


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.one_of(st.sampled_from([0.125, 0.25, 0.5, 2.0, 8.0, 1.5, 0.75, 7 / 8]), st.floats(2.0**-12, 2.0**12, width=32)),
    st.floats(2.0**-20, 2.0**4, width=32),
    st.lists(st.integers(0, 126), min_size=2, max_size=6).filter(lambda codes: len(codes) % 2 == 0),
)
def test_halves_share_a_scale_if_every_product_is_a_number(ratio: float, unit: float, codes: list[int]) -> None:
    scale = torch.tensor(codes, dtype=torch.uint8).view(2, -1).view(torch.float8_e4m3fn)
    halves = torch.tensor([unit, unit * ratio]).double()
    means = decode_e4m3(scale) * halves[:, None]
    numbers = decode_e4m3(torch.arange(127, dtype=torch.uint8)) * halves.max()
    assert can_share(scale, halves) is bool(torch.isin(means, numbers).all())
    if can_share(scale, halves):
        assert torch.equal(decode_e4m3(shared_halves(scale, halves)) * halves.max(), means)


def test_other_ratios_are_exact_only_by_accident() -> None:
    halves = torch.tensor([1.5, 1.0]).double()
    assert not can_share(all_scales(), halves)
    by_accident = torch.tensor([[1.0, 1.125], [1.5, 3.0]]).to(torch.float8_e4m3fn)
    assert can_share(by_accident, halves)
    assert shared_halves(by_accident, halves).float().tolist() == [[1.0, 1.125], [1.0, 2.0]]


@pytest.mark.error_path
def test_the_wrapper_names_experts_whose_halves_share_no_scale() -> None:
    layer = small_layer("wrapper")
    tensors = layer.raw()
    tensors["w13_global_scale"][[0, 2], 1] *= 0.7
    with pytest.raises(WeightsError, match=r"gate and up of local experts \[0, 2\] differ"):
        layer.prepare(tensors)
