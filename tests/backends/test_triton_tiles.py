"""Which tiles a layer gets: pure functions of sizes and of the device."""

from __future__ import annotations

import pytest

from moe_core.backends.triton.tiles import MEASURED, TileTable

#: Of one program on Hopper, and on consumer cards.
LARGE, SMALL = 227 << 10, 99 << 10


def _bytes(table: TileTable, tile: object, halves: int) -> int:
    sizes = {"half": (2, 2), "byte": (1, 1), "narrow": (2, 1)}[table.operands]
    return tile.num_stages * tile.k * (tile.m * sizes[0] + tile.n * halves * sizes[1])  # type: ignore[attr-defined]


@pytest.mark.parametrize("shared", [LARGE, SMALL])
@pytest.mark.parametrize("operands", MEASURED)
def test_every_tile_fits_into_shared_memory(operands: str, shared: int) -> None:
    table = TileTable(operands=operands, shared_bytes=shared, descriptors=True)
    for slots in (1, 64, 1000, 100_000):
        first, second = table.choose(slots, 16, 2, (0, 0))
        assert first.m == second.m
        assert _bytes(table, first, 2) <= shared
        assert _bytes(table, second, 1) <= shared


def test_more_rows_per_expert_take_larger_tiles() -> None:
    table = TileTable(operands="half", shared_bytes=LARGE, descriptors=True)
    rows = [table.choose(slots, 8, 2, (0, 0))[0].m for slots in (8, 64, 65, 192, 384, 385, 10_000)]
    assert rows == [16, 16, 32, 32, 64, 128, 128]


def test_no_descriptors_where_the_device_or_the_weights_have_none() -> None:
    table = TileTable(operands="half", shared_bytes=LARGE, descriptors=False)
    assert not any(tile.tma for tile in table.choose(10_000, 8, 2, (0, 0)))


def test_a_step_stays_inside_a_block_of_scales() -> None:
    table = TileTable(operands="byte", shared_bytes=LARGE, descriptors=False)
    first, second = table.choose(10, 8, 2, (128, 32))
    assert (first.k, second.k) == (128, 32)


def test_a_table_of_ones_own() -> None:
    pair = MEASURED["half"][32]
    table = TileTable(operands="half", shared_bytes=LARGE, descriptors=False, pairs={32: pair})
    assert table.choose(1, 8, 2, (0, 0)) == table.choose(10_000, 8, 2, (0, 0)) == pair
