"""The grouped GEMM and the path of one token, against float64."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from oracle import TOLERANCE, layer, make_params, make_tokens, relative_error
from triton_layers import DEVICE

from moe_core.activation import RELU2, SWIGLU, SWIGLU_OAI, ActivationSpec
from moe_core.errors import SpecError

pytest.importorskip("triton", reason="needs triton")
from moe_core.kernels.panels import fill_panels
from moe_core.kernels.triton.combine import combine
from moe_core.kernels.triton.gemm import GroupedGemm
from moe_core.kernels.triton.one_token import OneToken
from moe_core.kernels.triton.quantize import quantize_rows
from moe_core.kernels.triton.sort import group_tiles, sort_slots
from moe_core.kernels.triton.tiles import Tile, VectorTile
from moe_core.kernels.triton.weights import GroupedWeight

#: No size is a multiple of a tile; descriptors need rows of 16 bytes.
EXPERTS, TOP_K, HIDDEN, INNER = 5, 3, 72, 40
INTERLEAVED = ActivationSpec(kind="gelu_tanh", row_order="interleaved", limit=1.0, clamp="after")
TILES = [
    Tile(16, 32, 32),
    Tile(16, 32, 32, swap=True),
    Tile(16, 32, 32, tma=True),
    Tile(16, 32, 32, tma=True, tma_rows=True),
    Tile(16, 32, 32, tma=True, resident=7),
    Tile(16, 32, 32, swap=True, resident=2),
    Tile(16, 32, 32, swap=True, tma=True),
]


def _weights(params: dict[str, Any]) -> tuple[GroupedWeight, GroupedWeight]:
    w13, b13, w2, b2 = (params[name].to(DEVICE) for name in ("w13", "b13", "w2", "b2"))
    return GroupedWeight(data=w13, bias=b13), GroupedWeight(data=w2, bias=b2)


def _case(dtype: torch.dtype, spec: ActivationSpec, tokens: int) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    params = make_params(EXPERTS, HIDDEN, INNER, dtype, gated=spec.gated, bias=True)
    hidden, ids, weights = make_tokens(tokens, HIDDEN, EXPERTS, TOP_K, dtype)
    ids[::3, 1] = -1
    return params, (hidden, ids, weights)


@pytest.mark.parametrize("tile", TILES, ids=["plain", "swap", "tma", "rows", "persistent", "both", "bulk"])
@pytest.mark.parametrize("spec", [SWIGLU_OAI, INTERLEAVED, RELU2], ids=str)
def test_two_projections(spec: ActivationSpec, tile: Tile) -> None:
    params, (hidden, ids, weights) = _case(torch.bfloat16, spec, 9)
    w13, w2 = _weights(params)
    hidden, router = hidden.to(DEVICE), weights.to(DEVICE)
    slots = sort_slots(ids.to(DEVICE), EXPERTS, tile.m)
    inside, rows = hidden.new_empty(9 * TOP_K, INNER), hidden.new_empty(9 * TOP_K, HIDDEN)
    GroupedGemm(w13, activation=spec)(hidden, slots.tiles, inside, tile, order=slots.order, top_k=TOP_K)
    GroupedGemm(w2)(inside, slots.tiles, rows, tile)
    got = combine(rows, slots.row_map, router, torch.bfloat16).cpu()
    assert relative_error(got, layer(hidden.cpu(), ids, weights, params, spec)) < TOLERANCE[torch.bfloat16]
    assert rows[int(slots.group_ends[-1]) :].isnan().all(), "rows past the last group are not written"


def _in_panels(weight: GroupedWeight, spec: ActivationSpec | None, rows: int, columns: int) -> GroupedWeight:
    in_halves = spec is not None and spec.gated and spec.row_order == "gate_up"
    experts, height, width = weight.data.shape
    panels = weight.data.new_full((experts, height // rows, width // columns, rows, columns), torch.nan)
    for expert, into in zip(weight.data, panels, strict=True):
        fill_panels(into, expert, in_halves=in_halves)
    return GroupedWeight(data=panels, bias=weight.bias)


PANEL_TILES = [
    Tile(16, 16, 32),
    Tile(16, 16, 32, swap=True),
    Tile(16, 32, 32, tma=True),
    Tile(16, 32, 32, tma=True, resident=3),
]


@pytest.mark.parametrize("tile", PANEL_TILES, ids=str)
@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize(("spec", "panel"), [(SWIGLU_OAI, 16), (INTERLEAVED, 64), (RELU2, 32)], ids=str)
def test_weights_in_panels(spec: ActivationSpec, panel: int, own_rows: bool, tile: Tile) -> None:
    hidden_size, inner, tokens = 64, 64, 9
    params = make_params(EXPERTS, hidden_size, inner, torch.bfloat16, gated=spec.gated, bias=True)
    hidden, ids, weights = make_tokens(tokens, hidden_size, EXPERTS, TOP_K, torch.bfloat16)
    ids[::3, 1] = -1
    stored = _weights(params)
    w13, w2 = _in_panels(stored[0], spec, panel, tile.k), _in_panels(stored[1], None, panel, tile.k)
    on_device, router = hidden.to(DEVICE), weights.to(DEVICE)
    slots = sort_slots(ids.to(DEVICE), EXPERTS, tile.m)
    inside, rows = on_device.new_empty(tokens * TOP_K, inner), on_device.new_empty(tokens * TOP_K, hidden_size)
    gather = {"order": slots.order, "top_k": TOP_K}
    GroupedGemm(w13, activation=spec)(on_device, slots.tiles, inside, tile, counts_programs=own_rows, **gather)
    programs = -(-inner // tile.n) if own_rows else 0
    assert set(slots.tiles.table[slots.tiles.table[:, 0] >= 0, 4].tolist()) == {programs}
    GroupedGemm(w2)(inside, slots.tiles, rows, tile, awaited=programs)
    got = combine(rows, slots.row_map, router, torch.bfloat16).cpu()
    assert relative_error(got, layer(hidden, ids, weights, params, spec)) < TOLERANCE[torch.bfloat16]
    token = OneToken(w13, w2, spec, (VectorTile(4, 32), VectorTile(8, 64)))(
        on_device[:1], ids[:1].to(DEVICE), router[:1]
    )
    assert relative_error(token.cpu(), layer(hidden[:1], ids[:1], weights[:1], params, spec)) < 2**-8


@pytest.mark.error_path
def test_a_tile_whose_steps_are_no_panels_is_refused() -> None:
    weight = GroupedWeight(data=torch.zeros(2, 1, 2, 16, 32, dtype=torch.bfloat16, device=DEVICE))
    rows = torch.zeros(4, 64, dtype=torch.bfloat16, device=DEVICE)
    tiles = group_tiles(torch.tensor([2, 2], dtype=torch.int32, device=DEVICE), 4, 16)
    with pytest.raises(SpecError, match="a step has the columns of a panel, 32; make k that many"):
        GroupedGemm(weight)(rows, tiles, rows.new_empty(4, 16), Tile(16, 16, 64))


@pytest.mark.parametrize(
    ("tile", "usual"),
    [(TILES[3], None), (TILES[4], None), (TILES[1], 4), (TILES[0], 31), (TILES[2], 0), (TILES[5], -3)],
    ids=["rows", "persistent", "few programs", "as many as tiles", "none expected", "fewer than none"],
)
def test_tiles_of_one_expert_take_turns(tile: Tile, usual: int | None) -> None:
    # A turn and a part of one, none, one row, and full turns alone and with one tile more; 3 tiles of columns.
    counts = [200, 0, 1, 128, 129]
    weight = make_params(EXPERTS, HIDDEN, INNER, torch.bfloat16)["w2"]
    rows = torch.randn(sum(counts), INNER).bfloat16()
    on_device = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    tiles = group_tiles(on_device, len(rows), tile.m, group_ends=on_device.cumsum(0, dtype=torch.int32))
    # Thirty-one tiles, and entries of the table that hold none.
    assert len(tiles) > int((tiles.table[:, 0] >= 0).sum()) == 31
    tiles.usual = usual
    out = torch.full((len(rows), HIDDEN), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    got = GroupedGemm(GroupedWeight(data=weight.to(DEVICE)))(rows.to(DEVICE), tiles, out, tile).cpu()
    parts = zip(rows.double().split(counts), weight.double(), strict=True)
    assert relative_error(got, torch.cat([part @ expert.T for part, expert in parts])) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_results_written_as_codes_are_those_of_a_pass_of_its_own(dtype: torch.dtype, swap: bool) -> None:
    # The last tile has one group of columns and a half, the last half group none of them.
    inner, group, tile = 40, 16, Tile(16, 32, 32, swap=swap)
    hidden, ids, _ = make_tokens(9, HIDDEN, EXPERTS, TOP_K, torch.bfloat16)
    ids[::3, 1] = -1
    weight = GroupedWeight(data=make_params(EXPERTS, HIDDEN, inner, torch.bfloat16)["w13"].to(DEVICE))
    slots, rows = sort_slots(ids.to(DEVICE), EXPERTS, tile.m), 9 * TOP_K
    gather = {"order": slots.order, "top_k": TOP_K}
    inside = torch.empty(rows, inner, dtype=torch.bfloat16, device=DEVICE)
    GroupedGemm(weight, activation=SWIGLU)(hidden.to(DEVICE), slots.tiles, inside, tile, **gather)
    want = quantize_rows(inside, dtype, group, tiles=slots.tiles)
    gemm = GroupedGemm(weight, activation=SWIGLU, rounded_from=torch.bfloat16, rounded_group=group)
    assert [gemm.rounds(attrs.evolve(tile, n=n)) for n in (8, 16, 32)] == [False, True, True]
    codes, scale = torch.empty_like(inside, dtype=dtype), inside.new_empty(rows, 3, dtype=torch.float32)
    gemm(hidden.to(DEVICE), slots.tiles, codes, tile, out_scale=scale, **gather)
    real = slots.row_map[slots.row_map >= 0].long()
    assert torch.equal(scale[real], want[1][real])
    assert torch.equal(codes.view(torch.int8)[real], want[0].view(torch.int8)[real])
    assert scale[int(slots.group_ends[-1]) :].isnan().all(), "rows past the last group are not written"


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_may_lie_in_any_order(transposed: bool) -> None:
    params, (hidden, ids, weights) = _case(torch.float16, SWIGLU, 4)
    w13, w2 = _weights(params)
    if transposed:
        w13.data, w2.data = (weight.data.mT.contiguous().mT for weight in (w13, w2))
        w13.bias, w2.bias = (torch.stack([weight.bias] * 2, dim=-1)[..., 0] for weight in (w13, w2))
    assert w13.takes_descriptors() is not transposed
    hidden = hidden.to(DEVICE)
    slots = sort_slots(ids.to(DEVICE), EXPERTS, 16)
    inside, rows = hidden.new_empty(4 * TOP_K, INNER), hidden.new_empty(4 * TOP_K, HIDDEN, dtype=torch.float32)
    GroupedGemm(w13, activation=SWIGLU)(hidden, slots.tiles, inside, TILES[0], order=slots.order, top_k=TOP_K)
    GroupedGemm(w2)(inside, slots.tiles, rows, TILES[0])
    got = combine(rows, slots.row_map, weights.to(DEVICE), torch.float16).cpu()
    assert relative_error(got, layer(hidden.cpu(), ids, weights, params, SWIGLU)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("spec", [SWIGLU_OAI, INTERLEAVED, RELU2], ids=str)
def test_one_token(spec: ActivationSpec) -> None:
    params, tokens = _case(torch.bfloat16, spec, 1)
    w13, w2 = _weights(params)
    tiles = VectorTile(4, 32), VectorTile(8, 32)
    got = OneToken(w13, w2, spec, tiles)(*(tensor.to(DEVICE) for tensor in tokens)).cpu()
    # Only the output is rounded.
    assert relative_error(got, layer(*tokens, params, spec)) < 2**-8
