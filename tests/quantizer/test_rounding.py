"""Codes and scales against the float64 oracle, one by one, also where a quotient is a tie or nearly one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference_moe import (
    encode_e2m1,
    encode_e4m3fn,
    nvfp4_global,
    quant_fp8_block,
    quant_int,
    quant_mxfp4,
    quant_nvfp4,
    to_e2m1,
)

from moe_core.quantizer.nvfp4 import nvfp4_divisor
from moe_core.quantizer.rounding import (
    nvfp4_global_scale,
    quantize_fp8_tiles,
    quantize_int,
    quantize_mxfp4,
    quantize_nvfp4,
)


def _normal(seed: int) -> torch.Tensor:
    return torch.randn(37, 150, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _few_bits(seed: int) -> torch.Tensor:
    """Small whole numbers and halves: quotients are ties all the time."""
    drawn = torch.randint(-24, 25, (37, 150), generator=torch.Generator().manual_seed(seed))
    return (drawn / 2).bfloat16()


def _wide_range(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-40, 40, (37, 150), generator=generator)
    return torch.randn(37, 150, generator=generator).mul(2.0**exponents).bfloat16()


def _halves(seed: int) -> torch.Tensor:
    """Every row has its largest value and half of it: amax / 2 over amax / 127 is a tie but for the rounded scale."""
    weight = _normal(seed).float()
    amax = weight.abs().amax(1, keepdim=True)
    return torch.where(weight > 0.5, amax / 2, weight).bfloat16()


def _with_zeros(seed: int) -> torch.Tensor:
    weight = _normal(seed)
    weight[3], weight[5, 16:80], weight[:, 128:] = 0, 0, 0
    return weight


WEIGHTS = [_normal, _few_bits, _wide_range, _halves, _with_zeros, lambda seed: _normal(seed).float()]
each_weight = pytest.mark.parametrize("draw", WEIGHTS, ids=["normal", "ties", "range", "halves", "zeros", "fp32"])
Draw = Callable[[int], torch.Tensor]


@each_weight
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_integers(draw: Draw, bits: int) -> None:
    weight = draw(bits)
    got, want = quantize_int(weight, bits), quant_int(weight, bits, None)
    assert got.codes.dtype == torch.int8
    assert got.scale.dtype == torch.float32
    assert torch.equal(got.codes.double(), want.q)
    assert torch.equal(got.scale.double(), want.scale)


@each_weight
@pytest.mark.parametrize("tile", [(128, 128), (16, 64), (1, 128)])
def test_fp8_tiles(draw: Draw, tile: tuple[int, int]) -> None:
    weight = draw(7)
    got, want = quantize_fp8_tiles(weight, *tile), quant_fp8_block(weight, *tile)
    assert torch.equal(got.codes.view(torch.uint8), encode_e4m3fn(want.q))
    assert torch.equal(got.scale.double(), want.scale)


@each_weight
def test_nvfp4(draw: Draw) -> None:
    weight = draw(11)
    multiplier = nvfp4_global_scale(weight.abs().amax())
    assert torch.equal(multiplier.double(), nvfp4_global(weight))
    got, want = quantize_nvfp4(weight, multiplier), quant_nvfp4(weight, multiplier.double())
    assert torch.equal(got.scale.view(torch.uint8), encode_e4m3fn(want.scale))
    assert torch.equal(got.codes, encode_e2m1(want.q))


@each_weight
def test_nvfp4_with_a_divisor(draw: Draw) -> None:
    weight = draw(12)
    divisor = nvfp4_divisor(weight.abs().amax())
    got = quantize_nvfp4(weight, divisor, divides=True)
    block = (got.scale.double() / divisor.double()).repeat_interleave(16, 1)[:, : weight.shape[1]]
    codes = torch.where(block > 0, to_e2m1(weight.double() / torch.where(block > 0, block, 1.0)), 0.0)
    assert torch.equal(got.codes, encode_e2m1(codes))
    largest = weight.double().abs().amax()
    # The largest block scale is 448 but for the rounding of the divisor.
    assert largest == 0 or got.scale.double().amax() == 448


@each_weight
def test_mxfp4(draw: Draw) -> None:
    weight = draw(13)
    got, want = quantize_mxfp4(weight), quant_mxfp4(weight)
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.codes, encode_e2m1(want.q))


def test_exact_quotients_decide_where_fp32_would_see_a_tie() -> None:
    weight = _halves(3)
    exact = quantize_int(weight, 8)
    rounded_twice = (weight.float() / exact.scale).round()
    assert not torch.equal(exact.codes.float(), rounded_twice)


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0]])
    codes = quantize_mxfp4(ties).codes[0].tolist()
    assert codes == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 14]


def test_nothing_but_zeros() -> None:
    zeros = torch.zeros(4, 64, dtype=torch.bfloat16)
    one = nvfp4_global_scale(zeros.amax())
    assert one == nvfp4_divisor(zeros.amax()) == 1
    for quantized in (
        quantize_int(zeros, 4),
        quantize_fp8_tiles(zeros, 128, 128),
        quantize_nvfp4(zeros, one),
        quantize_nvfp4(zeros, one, divides=True),
        quantize_mxfp4(zeros),
    ):
        assert not quantized.codes.double().any()
        assert quantized.scale.double().isfinite().all()
