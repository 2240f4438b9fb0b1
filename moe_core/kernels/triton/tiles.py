"""Sizes of the tiles of a grouped GEMM, as values; free of torch and Triton, so that tables can be made anywhere."""

from __future__ import annotations

import attrs


@attrs.frozen
class Tile:
    """How one grouped GEMM is cut into programs.

    Attributes:
        m: Rows per tile.
        n: Output columns per tile; a gated activation reads twice as many weight rows.
        k: Inputs per step.
        num_warps: Warps per program.
        num_stages: Steps in flight.
        tma: Weights come through the bulk copy engine (descriptors) instead of a copy per thread.
        swap: The weights are the first operand of the matrix instruction, whose tile has at least 64 rows.
    """

    m: int
    n: int
    k: int
    num_warps: int = 4
    num_stages: int = 3
    swap: bool = False
    tma: bool = False


@attrs.frozen
class VectorTile:
    """How one matrix times vector product is cut into programs.

    Attributes:
        n: Outputs per program.
        k: Inputs per step.
        num_warps: Warps per program.
    """

    n: int
    k: int
    num_warps: int = 4
