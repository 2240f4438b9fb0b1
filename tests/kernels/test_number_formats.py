"""Every code and every byte against scalar definitions."""

from __future__ import annotations

import math

import pytest
import torch
from reference_moe import ceil_pow2, decode_e2m1, decode_e8m0, floor_log2, int4_values, pow2, to_e2m1, to_e4m3fn

from moe_core.kernels.number_formats import (
    PAIRS,
    power_of_two_above,
    power_of_two_below,
    round_e2m1,
    round_e4m3,
    scale_values,
)

_BYTES = torch.arange(256, dtype=torch.uint8)


def test_packed_bytes_hold_the_first_element_in_the_low_nibble() -> None:
    assert torch.equal(PAIRS["fp4"].double(), torch.stack([decode_e2m1(_BYTES & 15), decode_e2m1(_BYTES >> 4)], 1))
    assert torch.equal(PAIRS["int4"].double(), torch.stack([int4_values(_BYTES & 15), int4_values(_BYTES >> 4)], 1))


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


def test_roundings_have_ties_to_even_and_saturate() -> None:
    grid = torch.arange(-9, 9, 1 / 1024)
    assert torch.equal(round_e2m1(grid).double(), to_e2m1(grid))
    wide = torch.cat([grid / 64, grid * 64, torch.tensor([448.0, 463.9, 464.0, 1e30, math.inf, -math.inf])])
    assert torch.equal(round_e4m3(wide).double(), to_e4m3fn(wide))
    assert round_e4m3(torch.tensor([math.nan])).float().isnan()
