"""Which tiles a layer's two GEMMs get: a measured table and the rule by which it is read; free of torch.

Nothing is tuned while a request waits. A table made on another machine can take this one's place (`TileTable`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from moe_core.kernels.triton.tiles import Tile, VectorTile

#: Tiles of the first and of the second projection; both have the same number of rows.
TilePair: TypeAlias = tuple[Tile, Tile]

#: What is multiplied: 16-bit floats on both sides, 8-bit codes on both, or floats and weights stored in fewer bits.
OPERANDS = ("half", "byte", "narrow")
_BYTES = {"half": (2, 2), "byte": (1, 1), "narrow": (2, 1)}


#: Rows per tile -> tiles; H100, 2026-11-28 (docs/benchmarks.md). With few rows, weights are the operand of 64 rows;
#: with many, 16-bit weights come through the bulk copy engine.
MEASURED: dict[str, dict[int, TilePair]] = {
    "half": {
        16: (Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 64, 128, 4, 4, swap=True)),
        32: (Tile(32, 64, 128, 4, 3), Tile(32, 128, 128, 4, 3)),
        64: (Tile(64, 128, 64, 4, 3, tma=True), Tile(64, 128, 64, 4, 4, tma=True)),
        128: (Tile(128, 128, 64, 8, 4, tma=True), Tile(128, 256, 64, 8, 4, tma=True)),
    },
    "byte": {
        16: (Tile(16, 64, 128, 4, 5, swap=True), Tile(16, 64, 128, 4, 5, swap=True)),
        32: (Tile(32, 64, 128, 4, 3, swap=True), Tile(32, 128, 128, 4, 3, swap=True)),
        64: (Tile(64, 64, 128, 4, 3), Tile(64, 128, 128, 4, 3)),
    },
    "narrow": {
        16: (Tile(16, 64, 128, 4, 3), Tile(16, 64, 128, 4, 3)),
        32: (Tile(32, 32, 128, 4, 3, swap=True), Tile(32, 64, 128, 4, 3, swap=True)),
        64: (Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4)),
        128: (Tile(128, 64, 64, 8, 4), Tile(128, 128, 64, 8, 4)),
    },
}
#: Most rows per expert, on average, for which tiles of so many rows are best; more rows take the largest.
_ROWS_UP_TO = {16: 8, 32: 24, 64: 48}

#: One token: tiles of both projections (H100, 2026-11-28).
ONE_TOKEN = (VectorTile(8, 512, 4), VectorTile(4, 1024, 8))


@attrs.frozen(kw_only=True)
class TileTable:
    """Tiles for every size of a layer on one device.

    Attributes:
        operands: One of `OPERANDS`.
        shared_bytes: Shared memory that one program may have.
        descriptors: Whether the device has a bulk copy engine and can read both projections with it.
        pairs: Rows per tile -> tiles.
        one_token: Tiles for a single token.
    """

    operands: str
    shared_bytes: int
    descriptors: bool
    pairs: Mapping[int, TilePair] = attrs.field()
    one_token: tuple[VectorTile, VectorTile] = ONE_TOKEN

    @pairs.default
    def _measured(self) -> Mapping[int, TilePair]:
        return MEASURED[self.operands]

    def choose(self, num_slots: int, num_experts: int, halves: int, block_columns: tuple[int, int]) -> TilePair:
        """The tiles for `num_slots` routed slots over `num_experts` experts.

        Args:
            num_slots: Tokens times top-k.
            num_experts: Local experts.
            halves: 2 for a gated layer, whose first GEMM reads two weight rows per output, else 1.
            block_columns: Inputs that share a weight scale in either GEMM, 0 for all; a step must lie within a block.
        """
        mean = num_slots / max(1, num_experts)
        rows = next((m for m, most in _ROWS_UP_TO.items() if mean <= most and m in self.pairs), max(self.pairs))
        first, second = self.pairs[rows]
        return self._allowed(first, halves, block_columns[0]), self._allowed(second, 1, block_columns[1])

    def _allowed(self, tile: Tile, halves: int, columns: int) -> Tile:
        """The tile without what the device lacks, and with steps inside a block of scales."""
        step = min(tile.k, columns) if columns and self.operands == "byte" else tile.k
        return self._fitted(attrs.evolve(tile, k=step, tma=tile.tma and self.descriptors), halves)

    def _fitted(self, tile: Tile, halves: int) -> Tile:
        """The tile with fewer or shorter steps, so that those in flight fit into shared memory."""
        row_bytes, weight_bytes = _BYTES[self.operands]
        while True:
            stage = tile.k * (tile.m * row_bytes + tile.n * halves * weight_bytes)
            if stage * tile.num_stages <= self.shared_bytes or tile.k <= 32:
                return tile
            if tile.num_stages > 2:
                tile = attrs.evolve(tile, num_stages=tile.num_stages - 1)
            else:
                tile = attrs.evolve(tile, k=tile.k // 2)
