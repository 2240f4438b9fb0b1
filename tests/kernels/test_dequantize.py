"""Stored weights of every element type and tile against decoding them by the oracle's formats."""

from __future__ import annotations

import math

import pytest
import torch
from reference_moe import decode_e2m1, decode_e4m3fn, decode_e8m0, int4_values, unpack_nibbles

from moe_core.kernels.expert_weights import StoredLinear
from moe_core.payloads import Tensor
from moe_core.quant import WHOLE

_ROWS, _COLUMNS = 20, 50


def _decoded(weight: Tensor, word: str) -> Tensor:
    if word in ("int4", "fp4"):
        codes = unpack_nibbles(weight)
        return int4_values(codes).double() if word == "int4" else decode_e2m1(codes)
    return decode_e4m3fn(weight.view(torch.uint8)) if word == "fp8" else weight.double()


def _stored(word: str) -> Tensor:
    if word in ("int4", "fp4"):
        return torch.randint(0, 256, (2, _ROWS, _COLUMNS // 2), dtype=torch.uint8)
    if word == "int8":
        return torch.randint(-128, 128, (2, _ROWS, _COLUMNS)).char()
    if word == "fp8":
        # Every code but the two NaNs.
        codes, signs = (torch.randint(0, end, (2, _ROWS, _COLUMNS)) for end in (127, 2))
        return (codes + 128 * signs).byte().view(torch.float8_e4m3fn)
    return torch.randn(2, _ROWS, _COLUMNS).to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(word, torch.float32))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("tile", [(1, 16), (1, 7), (8, 16), (8, WHOLE), (WHOLE, 5), (1, 64), (64, 64)])
@pytest.mark.parametrize(
    ("word", "with_zero_point"),
    [("fp8", False), ("fp4", False), ("int8", False), ("int8", True), ("int4", False), ("int4", True)],
)
def test_rows_of_any_tile(word: str, tile: tuple[int, int], scale_dtype: torch.dtype, with_zero_point: bool) -> None:
    weight = _stored(word)
    height, width = (size if side == WHOLE else side for side, size in zip(tile, (_ROWS, _COLUMNS), strict=True))
    shape = (2, -(-_ROWS // height), -(-_COLUMNS // width))
    is_exponent = scale_dtype == torch.uint8
    scale = torch.randint(100, 140, shape).byte() if is_exponent else (torch.rand(shape) + 0.5).to(scale_dtype)
    zero_point = torch.randint(-8, 8, shape).char() if with_zero_point else None
    linear = StoredLinear(weight=weight, weight_dtype=word, tile=tile, scale=scale, zero_point=zero_point)
    assert (linear.num_outputs, linear.num_inputs) == (_ROWS, _COLUMNS)
    row, column = (torch.arange(size) // side for size, side in ((_ROWS, height), (_COLUMNS, width)))
    at = 1, row[:, None], column
    factor = decode_e8m0(scale[at]) if is_exponent else scale[at].double()
    want = (_decoded(weight[1], word) - (0 if zero_point is None else zero_point[at])) * factor
    got = torch.full((_ROWS - 3, _COLUMNS), torch.nan)
    linear.reader(1).read(got, 3)
    # Differences and values are exact; the product is rounded once.
    torch.testing.assert_close(got.double(), want[3:], rtol=2.0**-24, atol=0)


@pytest.mark.parametrize("word", ["fp32", "bf16", "fp16", "fp8", "int8", "int4", "fp4"])
def test_codes_alone_are_exact_in_memory_of_any_strides(word: str) -> None:
    weight = _stored(word)
    out = torch.full((_COLUMNS, _ROWS), torch.nan).t()
    StoredLinear(weight=weight, weight_dtype=word).reader(0).read(out, 0)
    assert torch.equal(out.double(), _decoded(weight[0], word))


def test_zero_points_without_scales_inside_a_row() -> None:
    weight, zero_point = _stored("int4"), torch.randint(-8, 8, (2, _ROWS, 1)).char()
    plain, shifted = torch.empty(2, _ROWS, _COLUMNS).unbind()
    StoredLinear(weight=weight, weight_dtype="int4").reader(1).read(plain, 0)
    StoredLinear(weight=weight, weight_dtype="int4", zero_point=zero_point).reader(1).read(shifted, 0)
    assert torch.equal(shifted, plain - zero_point[1])


def test_a_stored_nan_stays_nan() -> None:
    weight = torch.tensor([[[0x7F, 0xFF, 0x7E]]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    out = torch.empty(1, 3)
    StoredLinear(weight=weight, weight_dtype="fp8").reader(0).read(out, 0)
    assert out.isnan().tolist() == [[True, True, False]]


def test_a_stored_nan_beside_scales_changes_no_other_number() -> None:
    weight = torch.tensor([[[0x7F, 0x38, 0x01], [0x40, 0x81, 0x7E]]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    linear = StoredLinear(weight=weight, weight_dtype="fp8", tile=(2, 3), scale=torch.tensor([[[0.25]]]))
    out = torch.empty(2, 3)
    linear.reader(0).read(out, 0)
    want = decode_e4m3fn(weight[0].view(torch.uint8)) / 4
    assert torch.equal(out.double().nan_to_num(77), want.nan_to_num(77))


@pytest.mark.parametrize("size", [2.0**119, 2.0**120, 1.9 * 2.0**127, 2.0**-126, 2.0**-149, 0.0, -0.75, math.inf])
@pytest.mark.parametrize("word", ["fp8", "fp4", "int8", "int4"])
def test_scales_of_any_size(word: str, size: float) -> None:
    codes = {"fp8": [0x38, 0xB0, 0x30, 0x08], "int8": [1, -1, 1, 0], "fp4": [0x21, 0x91], "int4": [0x1F, 0xF1]}[word]
    weight = torch.tensor(codes, dtype=torch.uint8 if word != "int8" else torch.int8)[None, None]
    weight = weight.view(torch.float8_e4m3fn) if word == "fp8" else weight
    # The largest first: one of them must not change what the other means.
    linear = StoredLinear(weight=weight, weight_dtype=word, tile=(1, 2), scale=torch.tensor([[[size, 0.5]]]))
    out = torch.empty(1, 4)
    linear.reader(0).read(out, 0)
    want = _decoded(weight[0], word) * torch.tensor([size, size, 0.5, 0.5]).double()
    torch.testing.assert_close(out, want.float(), rtol=0, atol=0)
