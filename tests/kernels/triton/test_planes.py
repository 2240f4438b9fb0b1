"""int4 weights in planes: the order of columns, every code, and products in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from oracle import relative_error
from triton_layers import DEVICE

from moe_core.kernels.triton.gemm import GroupedGemm
from moe_core.kernels.triton.planes import rows_in_planes
from moe_core.kernels.triton.sort import sort_slots
from moe_core.kernels.triton.tiles import Tile
from moe_core.kernels.triton.weights import GroupedWeight

EXPERTS, ROWS, COLUMNS = 3, 64, 384
TILE = Tile(16, 32, 128, 4, 2, swap=True, planes=True)


def _codes(data: torch.Tensor) -> torch.Tensor:
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2).double()
    return codes - 16 * (codes > 7)


def _product(weight: GroupedWeight, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), ROWS), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    slots = sort_slots(ids.to(DEVICE), len(weight.data), TILE.m)
    GroupedGemm(weight)(rows_in_planes(x.to(DEVICE)), slots.tiles, out, TILE)
    return out.cpu()


def test_columns_are_in_the_order_of_the_words_places() -> None:
    columns = torch.arange(2 * 384).view(2, 384).to(DEVICE)
    # Of each 128 columns, which are 16 words of eight: all first ones, all second ones, ...
    want = columns.view(2, 3, 16, 8).transpose(2, 3).reshape(2, 384)
    assert torch.equal(rows_in_planes(columns), want)


@pytest.mark.parametrize("zero", [None, -128, -8, 7, 127])
def test_every_code_at_every_place_is_exact(zero: int | None) -> None:
    # A row of ones at one column and zeros elsewhere reads one code of each weight row.
    data = (torch.arange(ROWS * 64, dtype=torch.int32).view(ROWS, 64) * 7 % 256).to(torch.uint8)
    assert len(data.unique()) == 256
    points = None if zero is None else torch.full((1, ROWS, 1), zero, dtype=torch.int8, device=DEVICE)
    weight = GroupedWeight(data=data[None].to(DEVICE), packing="int4", zero_point=points)
    got = _product(weight, torch.eye(128).bfloat16(), torch.zeros(128, 1, dtype=torch.int64))
    assert torch.equal(got.double(), _codes(data).T - (zero or 0))


@pytest.mark.parametrize("group", [0, 128, 384])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_zero", [False, True])
def test_products(group: int, scale_dtype: torch.dtype, has_zero: bool) -> None:
    groups = COLUMNS // (group or COLUMNS)
    data = torch.randint(0, 256, (EXPERTS, ROWS, COLUMNS // 2), dtype=torch.uint8)
    # Beyond what a product with a code could be in bf16, and what a scale rounded to bf16 would explain.
    scale = ((torch.rand(EXPERTS, ROWS, groups) + 0.5) * 3).to(scale_dtype)
    zero = torch.randint(-8, 8, (EXPERTS, ROWS, groups), dtype=torch.int8) if has_zero else None
    x, ids = torch.randn(40, COLUMNS).bfloat16(), torch.randint(0, EXPERTS, (20, 2))
    ids[::5, 1] = -1
    weight = GroupedWeight(
        data=data.to(DEVICE),
        packing="int4",
        scale=scale.to(DEVICE),
        block=(1, group),
        zero_point=None if zero is None else zero.to(DEVICE),
    )
    assert weight.takes_planes()
    spread = lambda values: values.double().repeat_interleave(COLUMNS // groups, dim=2)  # noqa: E731
    exact = (_codes(data) - (0 if zero is None else spread(zero))) * spread(scale)
    got = _product(weight, x, ids)
    # Rows are expert by expert; those of slots without one are not written.
    experts = ids.flatten().sort().values
    experts = experts[experts >= 0]
    want = torch.einsum("rnc,rc->rn", exact[experts], x[: len(experts)].double())
    # One rounding to bf16.
    assert relative_error(got[: len(experts)].double(), want) < 2.5e-3
    assert got[len(experts) :].isnan().all()


@pytest.mark.parametrize(
    ("fields", "columns"),
    [({"packing": "e2m1"}, 384), ({"packing": "plain"}, 384), ({}, 64), ({"block": (1, 64)}, 384)],
    ids=["e2m1", "8 bits", "half a step", "two scales in a step"],
)
def test_what_cannot_be_decoded_so(fields: dict[str, object], columns: int) -> None:
    data = torch.zeros(EXPERTS, ROWS, columns // 2, dtype=torch.uint8)
    assert not GroupedWeight(data=data, **({"packing": "int4"} | fields)).takes_planes()  # type: ignore[arg-type]


def test_words_that_lie_anywhere_cannot_be_decoded_so() -> None:
    data = torch.zeros(EXPERTS, ROWS, COLUMNS // 2 + 1, dtype=torch.uint8)[..., 1:]
    assert not GroupedWeight(data=data, packing="int4").takes_planes()
