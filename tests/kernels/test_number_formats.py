"""Every code and every byte against scalar definitions."""

from __future__ import annotations

import math

import pytest
import torch
from reference_moe import (
    ceil_pow2,
    decode_e2m1,
    decode_e4m3fn,
    decode_e8m0,
    floor_log2,
    int4_values,
    pow2,
    to_e2m1,
    to_e4m3fn,
)

from moe_core.kernels.number_formats import (
    E4M3_BITS_UNIT,
    byte_pairs,
    e4m3_bits,
    has_e4m3_nan,
    power_of_two_above,
    power_of_two_below,
    power_of_two_scale,
    round_e2m1,
    round_e4m3,
    round_to_e4m3,
    scale_values,
)

_BYTES = torch.arange(256, dtype=torch.uint8)


def test_packed_bytes_hold_the_first_element_in_the_low_nibble() -> None:
    for word, decode in (("fp4", decode_e2m1), ("int4", int4_values)):
        pairs = byte_pairs(word, torch.device("cpu")).view(256, 1).view(torch.float32)
        assert torch.equal(pairs.double(), torch.stack([decode(_BYTES & 15), decode(_BYTES >> 4)], 1).double())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_exponent_bytes(dtype: torch.dtype) -> None:
    got = scale_values(_BYTES.view(dtype)).double()
    assert torch.equal(got[:255], decode_e8m0(_BYTES[:255]))
    assert math.isnan(float(got[255]))


def test_powers_of_two_around_a_number() -> None:
    values = torch.cat([torch.rand(500) * 10.0 ** torch.randint(-30, 30, (500,)), 2.0 ** torch.arange(-126, 128)])
    assert torch.equal(power_of_two_above(values).double()[values < 2.0**127], ceil_pow2(values)[values < 2.0**127])
    assert torch.equal(power_of_two_below(values).double(), pow2(floor_log2(values.double())))
    assert torch.equal(power_of_two_above(torch.zeros(1)), torch.zeros(1))
    assert float(power_of_two_above(torch.tensor([1e-44]))) == 2.0**-126


@pytest.mark.parametrize("largest", [1.0, 2.0**15])
def test_scales_bring_rows_of_any_size_to_one_octave(largest: float) -> None:
    rows = torch.randn(250, 9).clamp(-3, 3) * 2.0 ** torch.linspace(-125, 125, 250)[:, None]
    scale = power_of_two_scale(rows, largest)
    assert torch.equal(scale.log2(), scale.log2().round())
    sizes = (rows / scale).abs().amax(1)[scale[:, 0] > 2.0**-126]
    assert sizes.numel() > 200
    assert ((sizes > largest / 2) & (sizes <= largest)).all()
    assert torch.equal((rows / scale) * scale, rows)
    odd = torch.tensor([[0.0], [1e-45], [torch.inf], [torch.nan]])
    assert torch.isin(power_of_two_scale(odd, largest), torch.tensor([2.0**-126, 2.0**127])).all()


def test_roundings_have_ties_to_even_and_saturate() -> None:
    grid = torch.arange(-9, 9, 1 / 1024)
    assert torch.equal(round_e2m1(grid).double(), to_e2m1(grid))
    wide = torch.cat([grid / 64, grid * 64, torch.tensor([448.0, 463.9, 464.0, 1e30, math.inf, -math.inf])])
    for round_ in (round_e4m3, round_to_e4m3):
        assert torch.equal(round_(wide).double(), to_e4m3fn(wide))
        assert round_(torch.tensor([math.nan])).float().isnan()


def test_e4m3_on_the_bits() -> None:
    codes = _BYTES[(_BYTES & 127) != 127].view(torch.float8_e4m3fn)
    assert torch.equal(e4m3_bits(codes).double() * E4M3_BITS_UNIT, decode_e4m3fn(codes.view(torch.uint8)))
    assert not has_e4m3_nan(codes)
    assert has_e4m3_nan(_BYTES[:128].view(torch.float8_e4m3fn))
    assert has_e4m3_nan(_BYTES[128:].view(torch.float8_e4m3fn))
