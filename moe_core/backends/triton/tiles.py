"""Which tiles a layer's two GEMMs get: a measured table and the rule by which it is read; free of torch.

Nothing is tuned while a request waits. A table made on another machine can take this one's place (`TileTable`).
"""

from __future__ import annotations

import math
from typing import TypeAlias

import attrs

from moe_core.kernels.triton.tiles import Tile, VectorTile

#: Tiles of the first and of the second projection; both have the same number of rows.
TilePair: TypeAlias = tuple[Tile, Tile]

#: What both projections multiply: 16-bit floats on both sides; 8-bit codes on both; floats, or codes in one projection,
#: and weights of 8-bit codes; floats and weights of 4-bit codes, or mixtures with other weights; bf16 and int4
#: weights that can be decoded in planes.
OPERANDS = ("half", "byte", "byte_weight", "narrow", "planes")
#: Bytes of a value that a tile of rows, and one of weights, takes in shared memory.
_BYTES = {"half": (2, 2), "byte": (1, 1), "byte_weight": (2, 1), "narrow": (2, 1), "planes": (2, 1)}

#: Of weights in planes, on every card (H200, 2026-11-29); above 32 rows per expert those of other 4-bit weights.
_IN_PLANES: dict[float, TilePair] = {
    8: (
        Tile(16, 64, 128, 4, 3, swap=True, planes=True),
        Tile(16, 128, 128, 4, 3, swap=True, own_rows=True, planes=True),
    ),
    24: (
        Tile(32, 64, 128, 4, 3, swap=True, planes=True),
        Tile(32, 128, 128, 4, 3, swap=True, own_rows=True, planes=True),
    ),
    32: (
        Tile(32, 64, 128, 4, 3, swap=True, planes=True),
        Tile(32, 256, 128, 4, 3, swap=True, own_rows=True, planes=True),
    ),
    96: (Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
    math.inf: (Tile(128, 64, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
}
#: Card -> operands -> most rows per expert, on average, and the tiles that are best up to there (docs/tried.md;
#: H100 2026-11-28, H200 2026-11-29). With few rows, weights are the operand of 64 rows; with many, they come through
#: the bulk copy engine. An H200 has the multiprocessors of an H100 and 1.4 times its bandwidth: there, two or more
#: programs on each hide each other's beginning and end, where on an H100 one with more steps in flight is as good.
MEASURED: dict[str, dict[str, dict[float, TilePair]]] = {
    "H100": {
        "half": {
            8: (Tile(16, 32, 128, 4, 6, swap=True), Tile(16, 64, 128, 4, 4, swap=True)),
            24: (Tile(32, 32, 128, 4, 2, swap=True), Tile(32, 64, 128, 4, 2, swap=True)),
            48: (Tile(64, 128, 64, 8, 3, tma=True), Tile(64, 128, 64, 8, 3, tma=True, tma_rows=True)),
            # Weights are still what takes the time.
            96: (Tile(128, 64, 128, 8, 3, tma=True), Tile(128, 128, 128, 4, 3, tma=True, tma_rows=True)),
            256: (Tile(128, 128, 64, 8, 4, tma=True), Tile(128, 256, 64, 8, 4, tma=True, tma_rows=True)),
            math.inf: (
                Tile(128, 128, 64, 8, 4, tma=True),
                Tile(128, 256, 64, 8, 3, tma=True, tma_rows=True, resident=1),
            ),
        },
        "byte": {
            8: (Tile(16, 32, 128, 4, 6, swap=True), Tile(16, 64, 128, 4, 5, swap=True)),
            24: (Tile(32, 32, 128, 4, 6, swap=True), Tile(32, 64, 128, 4, 3, swap=True, tma=True)),
            math.inf: (
                Tile(64, 128, 128, 8, 4, tma=True),
                Tile(64, 128, 128, 4, 4, tma=True, tma_rows=True, resident=2),
            ),
        },
        # Weights that are decoded are swapped only with four warps: with eight, Triton 3.6 computed int4 ones wrongly,
        # now and then. That leaves 7 % at 512 rows per expert.
        "byte_weight": {
            8: (Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 64, 128, 4, 4, swap=True)),
            24: (Tile(32, 32, 128, 4, 3, swap=True), Tile(32, 64, 128, 4, 3, swap=True)),
            48: (Tile(64, 64, 128, 4, 3, swap=True), Tile(64, 128, 64, 4, 4)),
            96: (Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
            math.inf: (Tile(128, 64, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
        },
        "narrow": {
            8: (Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 64, 128, 4, 4, swap=True)),
            24: (Tile(32, 32, 64, 4, 4, swap=True), Tile(32, 64, 64, 4, 4, swap=True)),
            96: (Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
            math.inf: (Tile(128, 64, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
        },
        "planes": _IN_PLANES,
    },
    "H200": {
        "half": {
            8: (Tile(16, 32, 128, 4, 3, swap=True), Tile(16, 128, 128, 4, 3, swap=True, tma=True, own_rows=True)),
            24: (Tile(32, 64, 128, 4, 2, swap=True, tma=True), Tile(32, 128, 64, 4, 5, swap=True, own_rows=True)),
            48: (Tile(64, 64, 64, 8, 3, tma=True), Tile(64, 128, 64, 4, 4, tma=True, tma_rows=True)),
            96: (Tile(128, 64, 64, 8, 7, tma=True), Tile(128, 256, 64, 8, 4, tma=True, tma_rows=True)),
            256: (Tile(128, 128, 64, 8, 4, tma=True), Tile(128, 256, 64, 8, 4, tma=True, tma_rows=True, resident=1)),
            math.inf: (
                Tile(128, 128, 64, 8, 4, tma=True),
                Tile(128, 256, 64, 8, 3, tma=True, tma_rows=True, resident=1),
            ),
        },
        "byte": {
            8: (Tile(16, 64, 128, 4, 4, swap=True), Tile(16, 128, 128, 4, 3, swap=True, tma=True, own_rows=True)),
            24: (Tile(32, 64, 128, 4, 5, swap=True, tma=True), Tile(32, 128, 128, 4, 3, swap=True)),
            96: (Tile(64, 64, 128, 4, 4, tma=True), Tile(64, 128, 128, 4, 3, tma=True, tma_rows=True)),
            math.inf: (
                Tile(64, 128, 128, 8, 4, tma=True),
                Tile(64, 128, 128, 4, 4, tma=True, tma_rows=True, resident=2),
            ),
        },
        "byte_weight": {
            8: (Tile(16, 64, 128, 4, 3, swap=True), Tile(16, 128, 64, 4, 4, swap=True, own_rows=True)),
            24: (Tile(32, 32, 128, 4, 3, swap=True), Tile(32, 128, 64, 4, 3, swap=True, own_rows=True)),
            48: (Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4)),
            96: (Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
            math.inf: (Tile(128, 64, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
        },
        "narrow": {
            8: (Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 128, 64, 4, 3, swap=True, own_rows=True)),
            24: (Tile(32, 32, 64, 4, 4, swap=True), Tile(32, 64, 64, 4, 4, swap=True, own_rows=True)),
            96: (Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
            math.inf: (Tile(128, 64, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
        },
        "planes": _IN_PLANES,
    },
}
#: The same for weights in panels (H200, 2026-11-29). A step is a panel's columns, 128 bytes.
MEASURED_IN_PANELS: dict[str, dict[float, TilePair]] = {
    "half": {
        2: (Tile(16, 32, 64, 4, 5, swap=True, tma=True), Tile(16, 128, 64, 4, 4, swap=True, tma=True, own_rows=True)),
        8: (Tile(16, 128, 64, 4, 3, swap=True, tma=True), Tile(16, 256, 64, 4, 3, swap=True, tma=True, own_rows=True)),
        24: (Tile(32, 128, 64, 8, 2, swap=True, tma=True), Tile(32, 128, 64, 4, 5, swap=True, tma=True, own_rows=True)),
        48: (Tile(64, 128, 64, 8, 5, tma=True), Tile(64, 256, 64, 8, 5, tma=True, own_rows=True)),
        96: (Tile(128, 128, 64, 8, 4, tma=True), Tile(128, 256, 64, 8, 4, tma=True)),
        256: (Tile(128, 128, 64, 8, 4, tma=True), Tile(128, 256, 64, 8, 4, tma=True, tma_rows=True, resident=1)),
        math.inf: (
            Tile(128, 128, 64, 8, 4, tma=True),
            Tile(128, 256, 64, 8, 3, tma=True, tma_rows=True, resident=1),
        ),
    },
    "byte": {
        # The first GEMM's tiles have whole groups of a scale each, which spares a launch that rounds.
        0.1: (
            Tile(16, 128, 128, 4, 4, swap=True, tma=True),
            Tile(16, 128, 128, 4, 3, swap=True, tma=True, own_rows=True),
        ),
        8: (
            Tile(16, 128, 128, 4, 3, swap=True, tma=True),
            Tile(16, 128, 128, 4, 3, swap=True, tma=True, own_rows=True),
        ),
        24: (
            Tile(32, 128, 128, 4, 3, swap=True, tma=True),
            Tile(32, 256, 128, 4, 3, swap=True, tma=True, own_rows=True),
        ),
        96: (Tile(64, 64, 128, 4, 4, tma=True), Tile(64, 128, 128, 4, 3, tma=True, tma_rows=True)),
        math.inf: (
            Tile(64, 128, 128, 8, 4, tma=True),
            Tile(64, 128, 128, 4, 4, tma=True, tma_rows=True, resident=2),
        ),
    },
}
#: The card whose tiles others get.
_USUAL = "H100"


def measured(operands: str, device_name: str, panels: bool = False) -> dict[float, TilePair]:
    """The tiles for these operands on a device, by the card that is a word of its name."""
    if panels:
        return MEASURED_IN_PANELS[operands]
    card = next((word for word in device_name.split() if word in MEASURED), _USUAL)
    return MEASURED[card][operands]


#: One token: tiles of both projections (H100, 2026-11-28).
ONE_TOKEN = (VectorTile(8, 512, 4), VectorTile(4, 1024, 8))


@attrs.frozen(kw_only=True)
class TileTable:
    """Tiles for every number of rows of a layer on one device.

    Attributes:
        operands: One of `OPERANDS`.
        shared_bytes: Shared memory that one program may have.
        descriptors: Whether the device has a bulk copy engine and can read both projections with it.
        device_name: As its driver says it; tells which card's tiles are taken.
        panels: Whether weights are in panels.
        halves: 2 for a gated layer, whose first GEMM reads two weight rows per output, else 1.
        wide_results: Whether the second GEMM's results are fp32; then its programs do not stay. One that stays holds a
            tile of results beside its steps, of 16 bits when it was measured, and twice that may not fit.
        block_columns: Inputs that share a weight scale in either GEMM, 0 for all; a step must lie within a block.
        pairs: Most rows per expert, on average and ascending -> tiles; more rows than the last take its tiles.
        one_token: Tiles for a single token.
    """

    operands: str
    shared_bytes: int
    descriptors: bool
    device_name: str = ""
    panels: bool = False
    halves: int = 2
    wide_results: bool = False
    block_columns: tuple[int, int] = (0, 0)
    pairs: dict[float, TilePair] = attrs.field()
    one_token: tuple[VectorTile, VectorTile] = ONE_TOKEN
    _allowed_pairs: tuple[tuple[float, TilePair], ...] = attrs.field(init=False)

    @pairs.default
    def _measured(self) -> dict[float, TilePair]:
        return measured(self.operands, self.device_name, self.panels)

    @_allowed_pairs.default
    def _allow(self) -> tuple[tuple[float, TilePair], ...]:
        first_block, second_block = self.block_columns
        return tuple(
            (rows, (self._allowed(first, self.halves, first_block), self._allowed(second, 1, second_block)))
            for rows, (first, second) in self.pairs.items()
        )

    def choose(self, rows_per_expert: float) -> TilePair:
        """The tiles for so many rows per expert, on average."""
        for most, pair in self._allowed_pairs:
            if rows_per_expert <= most:
                return pair
        return self._allowed_pairs[-1][1]

    def _allowed(self, tile: Tile, halves: int, columns: int) -> Tile:
        """The tile without what the device lacks, and with steps inside a block of scales."""
        step = min(tile.k, columns) if columns and self.operands == "byte" else tile.k
        if not self.descriptors:
            tile = attrs.evolve(tile, tma=False, tma_rows=False, resident=0)
        if self.wide_results:
            tile = attrs.evolve(tile, resident=0)
        return self._fitted(attrs.evolve(tile, k=step), halves)

    def _fitted(self, tile: Tile, halves: int) -> Tile:
        """The tile with fewer or shorter steps, so that those in flight fit into shared memory."""
        row_bytes, weight_bytes = _BYTES[self.operands]
        while True:
            stage = tile.k * (tile.m * row_bytes + tile.n * halves * weight_bytes)
            if stage * tile.num_stages <= self.shared_bytes or tile.k <= 32:
                return tile
            if self.panels and tile.num_stages <= 2:
                # A step is a panel's columns; what does not fit is refused when it is launched.
                return tile
            if tile.num_stages > 2:
                tile = attrs.evolve(tile, num_stages=tile.num_stages - 1)
            else:
                tile = attrs.evolve(tile, k=tile.k // 2)
