"""Activation and quantization in Triton: numbers that comparing with torch does not show."""

from __future__ import annotations

import pytest
import torch
from oracle import activate
from triton_layers import DEVICE

from moe_core.activation import RELU2, SWIGLU_OAI, ActivationSpec
from moe_core.errors import SpecError
from moe_core.specs import TokenDtype

pytest.importorskip("triton", reason="needs triton")
from moe_core.kernels.triton.activation import activate_rows, activation_constants
from moe_core.kernels.triton.quantize import quantize, quantize_rows

#: Rows 0, 1 and 6 of nine.
ROWS = [0, 1, 6]


@pytest.mark.parametrize("kind", ["silu", "relu"])
def test_activation_keeps_nan(kind: str) -> None:
    hidden = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]], device=DEVICE)
    spec = ActivationSpec(kind=kind, limit=2.0)
    assert activate_rows(hidden, spec).isnan().tolist() == [[True, True]]


@pytest.mark.error_path
def test_a_models_own_activation_is_no_kernel() -> None:
    with pytest.raises(SpecError, match="'module' has no kernel"):
        activation_constants(ActivationSpec(kind="module"))


def test_int8_codes_are_rounded_half_to_even() -> None:
    rows = torch.randn(5, 96)
    rows[1] = 0
    rows[2, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    rows[2, 4:] = 0
    codes, scales = (part.cpu() for part in quantize_rows(rows.to(DEVICE), torch.int8, 96))
    want = rows.abs().amax(-1, keepdim=True) / 127
    assert torch.equal(scales, want)
    assert torch.equal(codes.float(), (rows / torch.where(want == 0, 1.0, want)).round())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_are_those_of_quotients(dtype: torch.dtype) -> None:
    largest = 127.0 if dtype == torch.int8 else 448.0
    # Every size of a scale that fp32 has in full; values on ties of codes, zeros of both signs, and what is infinite.
    sizes = 2.0 ** torch.randint(-116, 118, (400, 1))
    rows = torch.randn(400, 64).clamp(-5, 5) * sizes
    rows[:, 0] = largest * sizes[:, 0] * 1.5
    rows[:, 1:24] = torch.randint(-64, 65, (400, 23)) / 4 * sizes * 1.5
    rows[:, 24:28], rows[:, 28:32] = 0.0, -0.0
    rows[9, 50] = torch.nan
    if DEVICE != "cpu":
        # NumPy, on which the interpreter computes, warns of it.
        rows[7, 40] = torch.inf
    codes, scales = (part.cpu() for part in quantize_rows(rows.to(DEVICE), dtype, 64))
    assert torch.equal(
        scales[rows.isfinite().all(1)], (rows.abs().amax(1, keepdim=True) / largest)[rows.isfinite().all(1)]
    )
    quotient = (rows / scales).clamp(-largest, largest)
    if dtype == torch.int8:
        assert torch.equal(codes, quotient.round().nan_to_num(0.0).to(dtype))
        return
    want = quotient.to(dtype)
    # A scale that is NaN says enough; the interpreter's zeros have no sign.
    word = torch.float32 if DEVICE == "cpu" else torch.uint8
    there = ~quotient.isnan()
    found, want = (part.float() if word == torch.float32 else part.view(word) for part in (codes, want))
    assert torch.equal(found[there], want[there])


@pytest.mark.parametrize("token_dtype", [TokenDtype("int8", "token"), TokenDtype("fp8", "row_128")], ids=str)
@pytest.mark.parametrize("spec", [SWIGLU_OAI, RELU2], ids=str)
def test_activation_and_quantization_are_one_rounding(spec: ActivationSpec, token_dtype: TokenDtype) -> None:
    hidden = torch.randn(9, 160 * spec.rows_per_channel)
    real = torch.full((9,), -1, dtype=torch.int32, device=DEVICE)
    real[ROWS] = 0
    codes, scales = quantize(hidden.to(DEVICE), token_dtype, activation=spec, real=real)
    want = activate(hidden.double(), spec)[ROWS]
    factors = scales.cpu().view(9, -1)[ROWS].double().repeat_interleave(128 if scales.dim() > 1 else 160, 1)[:, :160]
    # Half a step: of the scale for integers, of the value (or of the smallest step) for three fraction bits.
    step = factors if token_dtype.dtype == "int8" else torch.maximum(want.abs() / 8, factors / 512)
    assert ((codes.cpu()[ROWS].double() * factors - want).abs() <= 0.501 * step).all()
