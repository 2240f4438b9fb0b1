"""Which tiles a layer gets: pure functions of sizes and of the device."""

from __future__ import annotations

import attrs
import pytest
import torch
from triton_layers import pretend_card, triton_layer

from moe_core import LayerRequest
from moe_core.backends.triton import tiles
from moe_core.backends.triton.tiles import MEASURED, OPERANDS, TileTable, measured

#: Of one program on Hopper, and on consumer cards.
LARGE, SMALL = 227 << 10, 99 << 10


def _bytes(table: TileTable, tile: object, halves: int) -> int:
    sizes = {"half": (2, 2), "byte": (1, 1), "byte_weight": (2, 1), "narrow": (2, 1), "planes": (2, 1)}[table.operands]
    return tile.num_stages * tile.k * (tile.m * sizes[0] + tile.n * halves * sizes[1])  # type: ignore[attr-defined]


@pytest.mark.parametrize("shared", [LARGE, SMALL])
@pytest.mark.parametrize("card", MEASURED)
@pytest.mark.parametrize("operands", OPERANDS)
def test_every_tile_fits_into_shared_memory(operands: str, card: str, shared: int) -> None:
    table = TileTable(operands=operands, shared_bytes=shared, descriptors=True, device_name=f"NVIDIA {card}")
    for rows in (0.1, 4, 20, 40, 64, 200, 6000):
        first, second = table.choose(rows)
        assert first.m == second.m
        assert _bytes(table, first, 2) <= shared
        assert _bytes(table, second, 1) <= shared


@pytest.mark.parametrize(("operands", "columns"), [("half", 64), ("byte", 128)])
def test_a_step_is_a_panels_columns_whatever_fits(operands: str, columns: int) -> None:
    table = TileTable(operands=operands, shared_bytes=32 << 10, descriptors=True, panels=True)
    assert {tile.k for rows in (1, 4, 20, 40, 90, 200, 6000) for tile in table.choose(rows)} == {columns}


def test_more_rows_per_expert_take_larger_tiles() -> None:
    table = TileTable(operands="half", shared_bytes=LARGE, descriptors=True)
    rows = [table.choose(mean)[0].m for mean in (1, 8, 8.1, 24, 48, 49, 1000)]
    assert rows == [16, 16, 32, 32, 64, 128, 128]


@pytest.mark.parametrize("card", MEASURED)
@pytest.mark.parametrize("operands", ["byte_weight", "narrow", "planes"])
def test_weights_that_are_decoded_are_swapped_with_four_warps_only(operands: str, card: str) -> None:
    assert all(tile.num_warps == 4 for pair in measured(operands, card).values() for tile in pair if tile.swap)


def test_a_card_has_its_own_tiles_and_others_those_of_an_h100() -> None:
    found = {name: measured("half", name) for name in ("NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "A100")}
    h100, h200 = MEASURED["H100"]["half"], MEASURED["H200"]["half"]
    assert h100 != h200
    # Nothing was measured on a GH200, whose name only ends like that of an H200.
    assert [*found.values()] == [h200, h100, h100, h100]
    assert all({*tables} == {*OPERANDS} for tables in MEASURED.values())


def test_a_layer_gets_the_tiles_of_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_card("NVIDIA H200", monkeypatch)
    asked: list[str] = []
    monkeypatch.setattr(tiles, "measured", lambda operands, name, _: asked.append(name) or measured(operands, name))
    request = LayerRequest(
        num_experts=2, top_k=1, hidden_size=16, intermediate_size=16, dtype="bf16", runner_backend="triton"
    )
    weights = {"w13": torch.zeros(2, 32, 16).bfloat16(), "w2": torch.zeros(2, 16, 16).bfloat16()}
    triton_layer(request, weights)
    assert set(asked) == {"NVIDIA H200"}


def test_no_descriptors_where_the_device_or_the_weights_have_none() -> None:
    table = TileTable(operands="half", shared_bytes=LARGE, descriptors=False)
    assert not any(tile.tma or tile.tma_rows or tile.resident for tile in table.choose(1000))


def test_no_program_stays_with_results_of_32_bits_beside_its_steps() -> None:
    narrow, wide = (
        TileTable(operands="half", shared_bytes=LARGE, descriptors=True, wide_results=wide).choose(1000)
        for wide in (False, True)
    )
    assert narrow[1].resident
    assert wide == (narrow[0], attrs.evolve(narrow[1], resident=0))


def test_a_step_stays_inside_a_block_of_scales() -> None:
    table = TileTable(operands="byte", shared_bytes=LARGE, descriptors=False, block_columns=(128, 32))
    first, second = table.choose(1)
    assert (first.k, second.k) == (128, 32)


def test_a_table_of_ones_own() -> None:
    pair = MEASURED["H100"]["half"][24]
    table = TileTable(operands="half", shared_bytes=LARGE, descriptors=False, pairs={32: pair})
    assert table.choose(1) == table.choose(1000) == pair
