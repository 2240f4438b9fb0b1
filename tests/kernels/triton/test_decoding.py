"""What weights of few bits become on their way into a product, bit by bit: rows of an identity bring them out again."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import pytest
import torch
from triton_layers import DEVICE

pytest.importorskip("triton", reason="needs triton")
from moe_core.kernels.triton.gemm import GroupedGemm
from moe_core.kernels.triton.sort import group_tiles
from moe_core.kernels.triton.tiles import Tile
from moe_core.kernels.triton.weights import INT4_SCALE_LIMIT, GroupedWeight
from moe_core.testing.formats import decode

EXPERTS, OUTPUTS = 2, 24
#: A program per expert; more take the interpreter longer.
TILE = Tile(128, 32, 32)
#: What a product may make of the numbers below fp32's normal ones.
SMALLEST = 2.0**-126
VALUES = {
    "int4": torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float64),
    "e2m1": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64),
}
#: Dtype of stored scales -> draws them, and their values.
SCALES: dict[str, Callable[[tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]]] = {
    "fp32": lambda shape: _itself(torch.randn(shape)),
    "bf16": lambda shape: _itself(torch.randn(shape).bfloat16()),
    "e4m3": lambda shape: _itself(torch.randn(shape).to(torch.float8_e4m3fn)),
    # The smallest is below fp32's normal numbers.
    "e8m0": lambda shape: _exponents(torch.randint(0, 140, shape, dtype=torch.uint8)),
}


def _itself(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scale, scale


def _exponents(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    stored.view(-1)[:2] = torch.tensor([0, 1])
    return stored, torch.exp2(stored.double() - 127)


def _codes(inputs: int) -> torch.Tensor:
    """`[L, N, C]`: every code in every place of a word, beside others in each row."""
    row, column = torch.arange(OUTPUTS)[:, None], torch.arange(inputs)
    return torch.stack([(5 * row + 3 * column + column // 8 * row + expert) % 16 for expert in range(EXPERTS)])


def _packed(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def _brought_out(weight: GroupedWeight, tile: Tile) -> torch.Tensor:
    """`[L, N, C]` as a product sees them."""
    experts, outputs, inputs = weight.data.shape[0], weight.num_rows, weight.num_inputs
    rows = torch.eye(inputs, dtype=torch.bfloat16).repeat(experts, 1).to(DEVICE)
    counts = torch.full((experts,), inputs, dtype=torch.int32, device=DEVICE)
    tiles = group_tiles(counts, len(rows), tile.m, group_ends=counts.cumsum(0, dtype=torch.int32))
    out = torch.full((len(rows), outputs), torch.nan, device=DEVICE)
    return GroupedGemm(weight)(rows, tiles, out, tile).cpu().view(experts, inputs, outputs).mT


def _are_equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    return float((got.double() - want.double()).abs().max()) < SMALLEST


def _spread(values: torch.Tensor, group: int, inputs: int) -> torch.Tensor:
    return values.double().repeat_interleave(group or inputs, dim=2)[..., :inputs]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("inputs", "words"), [(64, True), (72, True), (36, False)])
@pytest.mark.parametrize("packing", VALUES)
def test_every_code(packing: str, inputs: int, words: bool, swap: bool) -> None:
    codes = _codes(inputs)
    assert all(len({*codes[..., place::8].flatten().tolist()}) == 16 for place in range(8))
    weight = GroupedWeight(data=_packed(codes).to(DEVICE), packing=packing)
    assert (weight.stored().dtype == torch.int32) is words
    assert _are_equal(_brought_out(weight, attrs.evolve(TILE, swap=swap)), VALUES[packing][codes])


@pytest.mark.parametrize("group", [0, 8, 16, 64])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("packing", VALUES)
def test_scales(packing: str, kind: str, group: int) -> None:
    # Half a group of 64 at the end; the last step is half a tile.
    inputs = 80
    codes = _codes(inputs)
    stored, scale = SCALES[kind]((EXPERTS, OUTPUTS, -(-inputs // group) if group else 1))
    weight = GroupedWeight(data=_packed(codes).to(DEVICE), packing=packing, scale=stored.to(DEVICE), block=(1, group))
    assert weight.stored().dtype == torch.int32
    # One product in fp32, one rounding to the dtype of the rows.
    want = (VALUES[packing][codes] * _spread(scale, group, inputs)).float().bfloat16()
    assert _are_equal(_brought_out(weight, TILE), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packing", VALUES)
def test_every_size_of_a_scale(packing: str, dtype: torch.dtype) -> None:
    inputs, group, info = 256, 8, torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    # Products are finite.
    largest = min(info.max / 256.0, INT4_SCALE_LIMIT * (1.0 - info.eps)) if packing == "int4" else info.max / 8.0
    sizes = torch.exp2(torch.arange(math.log2(least), math.log2(largest), dtype=torch.float64))
    sizes = torch.cat([sizes, 1.37 * sizes[:-1], -sizes, torch.tensor([largest])]).to(dtype)
    shape = EXPERTS, OUTPUTS, inputs // group
    scale = sizes.repeat(-(-math.prod(shape) // len(sizes)))[: math.prod(shape)].view(shape)
    codes = _codes(inputs)
    weight = GroupedWeight(data=_packed(codes).to(DEVICE), packing=packing, scale=scale.to(DEVICE), block=(1, group))
    want = VALUES[packing][codes]
    if packing == "int4":
        zero = torch.randint(-128, 128, shape, dtype=torch.int8)
        weight.zero_point = zero.to(DEVICE)
        want -= _spread(zero, group, inputs)
    want = (want * _spread(scale, group, inputs)).float().bfloat16()
    assert _are_equal(_brought_out(weight, TILE), want)


@pytest.mark.parametrize("packing", [*VALUES, "plain"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_every_byte_of_a_scale(dtype: torch.dtype, packing: str) -> None:
    inputs, group = 32, 16
    stored = torch.arange(256)
    if packing == "int4" and dtype == torch.uint8:
        # Those that it takes, and NaN.
        stored[stored >= 127 + math.log2(INT4_SCALE_LIMIT)] = 255
    scale = stored.to(torch.uint8).view(dtype)[None, :, None].expand(1, 256, inputs // group)
    # A row has one scale, so that the products of a NaN stay in its row.
    codes = torch.ones(1, 256, inputs, dtype=torch.int8)
    data = codes if packing == "plain" else _packed(codes)
    weight = GroupedWeight(data=data.to(DEVICE), packing=packing, scale=scale.to(DEVICE), block=(1, group))
    got = _brought_out(weight, TILE)
    values = decode(scale.contiguous(), "e8m0" if dtype == torch.uint8 else "e4m3")
    want = values.repeat_interleave(group, dim=2).mul(0.5 if packing == "e2m1" else 1.0)
    assert want.isnan().any(dim=2).sum() == (stored == 255).sum() + (dtype != torch.uint8)
    torch.testing.assert_close(got, want.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("group", [0, 16])
@pytest.mark.parametrize("scaled", [False, True])
def test_zero_points(scaled: bool, group: int) -> None:
    inputs, block = 80, group if scaled else 0
    codes = _codes(inputs)
    shape = (EXPERTS, OUTPUTS, -(-inputs // block) if block else 1)
    zero, scale = torch.randint(-128, 128, shape, dtype=torch.int8), torch.randn(shape)
    zero.view(-1)[:2] = torch.tensor([-128, 127])
    weight = GroupedWeight(data=_packed(codes).to(DEVICE), packing="int4", zero_point=zero.to(DEVICE), block=(1, block))
    want = VALUES["int4"][codes] - _spread(zero, block, inputs)
    if scaled:
        weight.scale = scale.to(DEVICE)
        want *= _spread(scale, block, inputs)
    assert _are_equal(_brought_out(weight, TILE), want.float().bfloat16())


@pytest.mark.parametrize("packing", VALUES)
@pytest.mark.parametrize("form", ["moved", "columns apart", "rows apart", "groups of 4"])
def test_where_words_cannot_be_had_bytes_are_read(form: str, packing: str) -> None:
    inputs, group = 64, 4 if form == "groups of 4" else 16
    codes = _codes(inputs)
    data, scale = _packed(codes), torch.randn(EXPERTS, OUTPUTS, inputs // group)
    if form == "moved":
        data = torch.cat([torch.zeros(1, dtype=torch.uint8), data.flatten()])[1:].view(data.shape)
    elif form == "columns apart":
        data = torch.stack([data, data], dim=-1)[..., 0]
    elif form == "rows apart":
        data = torch.cat([data, data[..., :2]], dim=-1)[..., : data.shape[2]]
    # A copy to another device would bring the bytes together again.
    moved = torch.empty_strided(data.shape, data.stride(), dtype=torch.uint8, device=DEVICE).copy_(data)
    weight = GroupedWeight(data=moved, packing=packing, scale=scale.to(DEVICE), block=(1, group))
    if form == "moved":
        weight.data = torch.empty(data.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(data.shape).copy_(data)
    assert weight.stored() is weight.data
    want = (VALUES[packing][codes] * _spread(scale, group, inputs)).float().bfloat16()
    assert _are_equal(_brought_out(weight, TILE), want)


def test_rows_a_multiple_of_words_apart_are_read_in_words() -> None:
    codes = _codes(64)
    data = torch.zeros(EXPERTS, OUTPUTS, 40, dtype=torch.uint8, device=DEVICE)[..., 4:36]
    weight = GroupedWeight(data=data.copy_(_packed(codes)), packing="int4")
    assert weight.stored().dtype == torch.int32
    assert _are_equal(_brought_out(weight, TILE), VALUES["int4"][codes])
