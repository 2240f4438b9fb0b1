"""Sizes of the tiles of a grouped GEMM, as values; free of torch and Triton, so that tables can be made anywhere."""

from __future__ import annotations

import attrs


@attrs.frozen(cache_hash=True)
class Tile:
    """How one grouped GEMM is cut into programs.

    Attributes:
        m: Rows per tile.
        n: Output columns per tile; a gated activation reads twice as many weight rows.
        k: Inputs per step.
        num_warps: Warps per program.
        num_stages: Steps in flight.
        tma: Weights come through the bulk copy engine (descriptors) instead of a copy per thread.
        tma_rows: So do the rows, where they lie one after the other, as before a second projection: with many rows it
            takes 2 to 16 % less time (H100).
        resident: Programs per multiprocessor that stay and take one tile after the other, loading for the next while
            they end one; 0 for a program per tile. Of second projections with hundreds of rows per expert it takes 1
            to 6 % off (H100); others become slower.
        swap: The weights are the first operand of the matrix instruction, whose tile has at least 64 rows.
        own_rows: Of a second projection: its programs wait for the rows of their own tile only, in which those of the
            first projection count themselves, instead of for the end of the first; `tma_rows` then means nothing.
        planes: Weights of int4 are decoded in planes (`moe_core.kernels.triton.planes`), and the rows have their
            columns in that order; `k` is 128, and `swap` set.
    """

    m: int
    n: int
    k: int
    num_warps: int = 4
    num_stages: int = 3
    swap: bool = False
    tma: bool = False
    tma_rows: bool = False
    resident: int = 0
    own_rows: bool = False
    planes: bool = False


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
