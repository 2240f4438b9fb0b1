from __future__ import annotations

import math

import attrs
import pytest
import torch

from moe_core.errors import WeightsError
from moe_core.quant import FP8_BLOCK128, FP8_BLOCK128_UE8M0, W8A8_INT8, LayerQuant
from moe_core.weights.requantize import to_ue8m0

TILES = attrs.evolve(FP8_BLOCK128, weight_block=(16, 32))


def e4m3_grid() -> list[float]:
    """All finite values, from the definition: bias 7, subnormal step 2^-9, no infinity."""
    positive = [m * 2.0**-9 for m in range(8)]
    positive += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return sorted({sign * value for value in positive for sign in (1, -1)})


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 value, ties to the even code."""
    grid = torch.tensor(e4m3_grid(), dtype=torch.float64)
    distance = (values[..., None] - grid).abs()
    best = distance.min(-1, keepdim=True).values
    # Of two equally near ones the even code: the one whose fraction is even.
    codes = grid.to(torch.float8_e4m3fn).view(torch.uint8) % 2
    return grid[(distance + codes * best.clamp(min=1e-300) * 1e-9).argmin(-1)]


def make(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn(2, rows, columns, generator=g) * 60).to(torch.float8_e4m3fn)
    shape = (2, math.ceil(rows / 16), math.ceil(columns / 32))
    return weight, torch.rand(shape, generator=g) * 10.0 ** torch.randint(-9, 2, shape, generator=g)


def test_power_of_two_scales_by_definition() -> None:
    weights = {"w13": make(40, 70), "w2": make(70, 40, seed=1)}
    tensors = {name: weight for name, (weight, _) in weights.items()}
    tensors |= {f"{name}_scale": scale for name, (_, scale) in weights.items()}
    # A block of zeros, and one whose largest value is a power of two times 448.
    tensors["w13"][0, :16, :32] = 0
    tensors["w13"][1, :16, :32] = 448.0
    tensors["w13_scale"][1, 0, 0] = 0.25
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    converted = to_ue8m0(tensors, LayerQuant.of(TILES))
    assert converted["w13_scale"][1, 0, 0] == 125
    for name in weights:
        assert torch.equal(tensors[name].view(torch.uint8), before[name].view(torch.uint8))
        weight, scale = tensors[name].double(), tensors[f"{name}_scale"].double()
        assert converted[f"{name}_scale"].dtype == torch.uint8
        for e in range(2):
            for i in range(scale.shape[1]):
                for j in range(scale.shape[2]):
                    part = (e, slice(16 * i, 16 * i + 16), slice(32 * j, 32 * j + 32))
                    values = (weight[part].float() * scale[e, i, j].float()).double()
                    amax = float(values.abs().max())
                    exponent = math.ceil(math.log2(amax / 448)) if amax else -126
                    assert int(converted[f"{name}_scale"][e, i, j]) == exponent + 127
                    assert torch.equal(converted[name][part].double(), nearest(values / 2.0**exponent))


def test_other_tensors_stay() -> None:
    weight, scale = make(32, 64)
    bias = torch.zeros(2, 32)
    tensors = {"w13": weight, "w13_scale": scale, "w2": weight, "w2_scale": scale, "b13": bias}
    assert to_ue8m0(tensors, LayerQuant.of(TILES))["b13"] is bias


@pytest.mark.error_path
def test_only_once_and_only_fp8_blocks() -> None:
    weight, scale = make(32, 64)
    tensors = {"w13": weight, "w13_scale": scale, "w2": weight, "w2_scale": scale}
    converted = to_ue8m0(tensors, LayerQuant.of(TILES))
    with pytest.raises(WeightsError, match=r"w13: only FP8 weights in blocks .* got fp8_block128_ue8m0 .* of uint8"):
        to_ue8m0(converted, LayerQuant.of(FP8_BLOCK128_UE8M0))
    with pytest.raises(WeightsError, match=r"w2: only FP8 weights in blocks .* got w8a8_int8"):
        to_ue8m0(tensors, LayerQuant(TILES, W8A8_INT8))


@pytest.mark.error_path
@pytest.mark.parametrize("spoilt", ["code", "scale", "product"])
def test_values_that_no_scale_can_hold_are_refused(spoilt: str) -> None:
    weight, scale = make(32, 64)
    tensors = {"w13": weight, "w13_scale": scale, "w2": weight.clone(), "w2_scale": scale.clone()}
    if spoilt == "code":
        tensors["w2"].view(torch.uint8)[1, 20, 3] = 0x7F
    else:
        tensors["w2"][1, 20, 3] = 448.0
        tensors["w2_scale"][1, 1, 0] = math.inf if spoilt == "scale" else 1e38
    with pytest.raises(WeightsError, match=r"w2, expert 1: block 1, 0 with scale .*: its values are not finite"):
        to_ue8m0(tensors, LayerQuant.of(TILES))
