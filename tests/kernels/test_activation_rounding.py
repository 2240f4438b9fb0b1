"""Rounded activations against the oracle's quantizers, in float64."""

from __future__ import annotations

import itertools
import math

import attrs
import pytest
import reference_moe
import torch
from quantized import round_exactly

from moe_core.errors import InputError
from moe_core.kernels.activation_rounding import ActivationRounder
from moe_core.payloads import Tensor
from moe_core.quant import MXFP4_W4A16, MXFP8, NVFP4, SCHEMES, W4A4_INT4, W8A8_INT8, WHOLE, QuantScheme

_WORDS = ("fp8", "int8", "int4", "fp4")
_INPUT_SCALE = torch.tensor(0.013)


def _scheme(word: str, group: int, scale: str = "fp32", how: str = "dynamic") -> QuantScheme:
    return attrs.evolve(
        W8A8_INT8, activation_dtype=word, activation_scaling=how, activation_group=group, activation_scale=scale
    )


def _values(rounder: ActivationRounder, x: Tensor, **more: Tensor) -> Tensor:
    values, factor = rounder(x, _INPUT_SCALE if rounder.static else None, **more)
    return values.double() if factor is None else values.double() * factor.double()


def _close(got: Tensor, want: Tensor, step: Tensor, word: str) -> None:
    """Equal up to fp32 rounding, but for the rare value on the two sides of a tie: there one step of the codes."""
    off = (got - want).abs() > 4e-7 * want.abs()
    largest_step = {"fp8": 32.0, "int8": 1.0, "int4": 1.0, "fp4": 2.0}[word]
    # bf16 values are often ties of one another.
    assert off.double().mean() < 2e-2
    assert bool(((got - want).abs() <= 1.001 * largest_step * step)[off].all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_word", ["fp32", "bf16", "e8m0"])
@pytest.mark.parametrize("group", [WHOLE, 0, 16, 24, 128])
@pytest.mark.parametrize("word", _WORDS)
def test_dynamic_scales(word: str, group: int, scale_word: str, dtype: torch.dtype) -> None:
    x = (torch.randn(17, 200) * 2.0 ** torch.randint(-6, 6, (17, 1))).to(dtype)
    x[3], x[5, 32:48] = 0.0, 0.0
    rounder = ActivationRounder.of(_scheme(word, group, scale_word))
    want, step = round_exactly(x, _scheme(word, group, scale_word), None)
    got = _values(rounder, x)
    _close(got, want, step, word)
    assert not got[3].any()


def test_int4_codes_on_cpu_are_those_of_exact_division() -> None:
    # Of every largest value m / 128, many of the others lie within half an ulp of a tie.
    largest = torch.arange(1, 128)[:, None] / 128
    x = (torch.arange(-127, 128) / 128).clamp(-largest, largest)
    codes, scale = ActivationRounder.of(W4A4_INT4)(x)
    assert scale is not None
    assert torch.equal(codes.double(), (x.double() / scale.double()).round())


@pytest.mark.parametrize("word", _WORDS)
@pytest.mark.parametrize("group", [WHOLE, 0, 32])
def test_a_static_scale_saturates(word: str, group: int) -> None:
    x = torch.randn(17, 200) * 10
    scheme = _scheme(word, group, how="static")
    want, step = round_exactly(x, scheme, float(_INPUT_SCALE))
    assert want.abs().max() < x.abs().max() / 1.5
    _close(_values(ActivationRounder.of(scheme), x), want, step, word)


@pytest.mark.parametrize("width", [64, 72])
def test_nvfp4(width: int) -> None:
    x = torch.randn(17, width) * 2.0 ** torch.randint(-9, 3, (17, 1))
    x[4] = 1e6
    rounder = ActivationRounder.of(NVFP4)
    want = reference_moe.quant_nvfp4(x, 0.0004)
    got, factor = rounder(x, torch.tensor(0.0004))
    assert factor is None
    step = want.scale.repeat_interleave(16, -1)[:, :width] * 0.0004
    _close(got.double(), want.deq, step, "fp4")


@pytest.mark.parametrize(("scheme", "exact"), [
    (SCHEMES["fp8_block128"], lambda x: reference_moe.quant_fp8_group(x)),
    (SCHEMES["fp8_block128_ue8m0"], lambda x: reference_moe.quant_fp8_group(x, ue8m0=True)),
    (MXFP8, lambda x: reference_moe.quant_fp8_group(x, 32, ue8m0=True)),
    (W8A8_INT8, lambda x: reference_moe.quant_int(x, 8)),
    (W4A4_INT4, lambda x: reference_moe.quant_int(x, 4)),
])  # fmt: skip
def test_named_schemes_round_as_the_oracle(scheme, exact) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(9, 160)
    want = exact(x)
    step = want.scale.repeat_interleave(-(-160 // want.scale.shape[1]), -1)[:, :160]
    _close(_values(ActivationRounder.of(scheme), x), want.deq, step, scheme.activation_dtype)


def test_ties_go_to_the_even_code() -> None:
    # amax 127 makes the scale exactly 1, so that the halves are ties.
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 3.25], [0.0] * 5, [-254.0, 1.0, 3.0, 5.0, 100.0]])
    want = torch.tensor([[127.0, 0.0, 2.0, -2.0, 3.0], [0.0] * 5, [-254.0, 0.0, 4.0, 4.0, 100.0]])
    assert torch.equal(_values(ActivationRounder.of(W8A8_INT8), x), want.double())


@pytest.mark.parametrize(
    ("word", "group", "scale_word"), list(itertools.product(_WORDS, (WHOLE, 0, 32), ("fp32", "e8m0")))
)
def test_tiny_and_subnormal_rows(word: str, group: int, scale_word: str) -> None:
    rounder = ActivationRounder.of(_scheme(word, group, scale_word))
    x = torch.randn(4, 64) * 1e-30
    want, step = round_exactly(x, _scheme(word, group, scale_word), None)
    _close(_values(rounder, x), want, step, word)
    subnormal = _values(rounder, torch.randn(4, 64) * 1e-41)
    assert subnormal.isfinite().all()
    assert subnormal.abs().max() < 1e-38


@pytest.mark.parametrize(("word", "group"), list(itertools.product(_WORDS, (WHOLE, 32))))
def test_nan_stays_in_its_row(word: str, group: int) -> None:
    x = torch.randn(4, 64)
    clean = _values(ActivationRounder.of(_scheme(word, group)), x)
    x[1, 5] = math.nan
    got = _values(ActivationRounder.of(_scheme(word, group)), x)
    assert got[1].isnan().any()
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


def test_a_scale_of_all_rows_ignores_those_without_a_token() -> None:
    rounder = ActivationRounder.of(_scheme("fp8", 0))
    assert rounder.needs_real_rows
    x = torch.randn(5, 32)
    want = _values(rounder, x[:3])
    x[3], x[4] = torch.nan, 1e30
    got = _values(rounder, x, is_real=torch.tensor([True, True, True, False, False]))
    assert torch.equal(got[:3], want)


def test_unquantized_activations_pass_through() -> None:
    x = torch.randn(2, 4)
    values, factor = ActivationRounder.of(MXFP4_W4A16)(x)
    assert values is x
    assert factor is None


@pytest.mark.error_path
@pytest.mark.parametrize("scheme", [NVFP4])
def test_a_missing_input_scale_is_named(scheme) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match="need input_scale"):
        ActivationRounder.of(scheme)(torch.zeros(1, 16))


@pytest.mark.parametrize(
    ("word", "group", "how"), list(itertools.product(_WORDS, (WHOLE, 0, 128), ("dynamic", "static")))
)
def test_no_rows_stay_no_rows(word: str, group: int, how: str) -> None:
    for scale_word in ("fp32", "e4m3"):
        rounder = ActivationRounder.of(_scheme(word, group, scale_word, how))
        assert rounder(torch.empty(0, 160), _INPUT_SCALE)[0].shape == (0, 160)
