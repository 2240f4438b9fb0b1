"""Stored weights against scalar decoding; fake-quantized activations against exact rounding."""

from __future__ import annotations

import pytest
import torch

from moe_core.errors import InputError, UnknownNameError
from moe_core.kernels import quantize
from moe_core.kernels.quantize import activation_rounder, dequantize
from moe_core.kernels.schemes import FLOAT_SCHEMES, SUPPORTED_SCHEMES
from moe_core.quant import BF16, MXFP4_W4A16, MXFP8, W4A4_INT4, W4A8_INT8, W8A8_INT8, QuantScheme

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_declared_schemes_are_the_table() -> None:
    assert {*FLOAT_SCHEMES, *quantize._READERS} == set(SUPPORTED_SCHEMES)


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_int8_is_scaled_per_channel(shape: tuple[int, ...]) -> None:
    weight, scale = torch.randint(-128, 128, (6, 9)).to(torch.int8), torch.rand(shape) + 0.01
    want = weight.double() * scale.double().view(6, 1)
    # One fp32 product.
    torch.testing.assert_close(dequantize(weight, scale, W8A8_INT8).double(), want, rtol=1e-7, atol=0)


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp4_decodes_low_nibble_first(scale_dtype: torch.dtype) -> None:
    weight = torch.randint(0, 256, (3, 32), dtype=torch.uint8)
    scale = torch.randint(100, 150, (3, 2), dtype=torch.uint8)
    want = torch.empty(3, 64, dtype=torch.float64)
    for row in range(3):
        for column in range(64):
            byte = int(weight[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            value = _E2M1_MAGNITUDES[code & 7] * (-1 if code & 8 else 1)
            want[row, column] = value * 2.0 ** (int(scale[row, column // 32]) - 127)
    got = dequantize(weight, scale.view(scale_dtype), MXFP4_W4A16)
    assert torch.equal(got.double(), want)
    assert dequantize(weight, scale.view(scale_dtype), MXFP4_W4A16, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_floats_are_copied_whatever_their_strides() -> None:
    weight = torch.randn(4, 6).bfloat16().t()
    assert torch.equal(dequantize(weight, None, BF16), weight.float())


@pytest.mark.parametrize("scheme", [MXFP8, W4A4_INT4, W4A8_INT8])
def test_a_scheme_without_entry_is_named_with_the_known(scheme: QuantScheme) -> None:
    with pytest.raises(UnknownNameError, match=rf"{scheme.label}.*w8a8_int8"):
        dequantize(torch.zeros(2, 2), torch.ones(2), scheme)
    with pytest.raises(UnknownNameError, match=scheme.label):
        activation_rounder(scheme)


def test_missing_scales_are_named() -> None:
    with pytest.raises(InputError, match="need scales"):
        dequantize(torch.zeros(2, 2, dtype=torch.int8), None, W8A8_INT8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_activations_are_rounded_half_to_even_per_token(dtype: torch.dtype) -> None:
    # amax 127 makes the scale exactly 1, so that the halves are ties.
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 3.25], [0.0] * 5, [-254.0, 1.0, 3.0, 5.0, 100.0]]).to(dtype)
    want = torch.tensor([[127.0, 0.0, 2.0, -2.0, 3.0], [0.0] * 5, [-254.0, 0.0, 4.0, 4.0, 100.0]])
    assert torch.equal(activation_rounder(W8A8_INT8)(x, None), want)


def test_unquantized_activations_pass_through() -> None:
    x = torch.randn(2, 4)
    assert activation_rounder(MXFP4_W4A16)(x, None) is x


@pytest.mark.parametrize("scheme", SUPPORTED_SCHEMES, ids=str)
@pytest.mark.parametrize("width", [32, 160])
def test_no_rows_stay_no_rows(scheme: QuantScheme, width: int) -> None:
    assert activation_rounder(scheme)(torch.empty(0, width), torch.tensor(0.01)).shape == (0, width)
