"""Which rows a program works on, and where what belongs to them lies."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.payloads import Tensor

#: Programs that keep a GPU busy; more rows than that are given to them in runs, of which 4 rows were best on an H200.
_PROGRAMS = 2048
_MOST_ROWS = 4
#: Numbers per entry of a table of tiles (`sort.RowTiles`), and the place of the last: how many programs have written.
TILE_FIELDS: tl.constexpr = tl.constexpr(5)
TILE_COUNT: tl.constexpr = tl.constexpr(4)


def rows_per_program(num_rows: int, real: Tensor | None) -> int:
    """Neighbouring rows for one program: several where most may be none, which then costs one look."""
    if real is None:
        return 1
    return min(_MOST_ROWS, max(1, num_rows // _PROGRAMS))


def flat_rows(rows: Tensor) -> Tensor:
    """`[..., C]` -> `[R, C]` with unit stride along C, as kernels want it; a copy only where strides forbid a view."""
    # A view of what is flat already would cost the CPU a microsecond.
    flat = rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


@triton.jit
def row_range(index, run, num_rows):
    """First row and row after the last of program `index`, a run of neighbours."""
    # Wide, since rows are multiplied by their length.
    first = index.to(tl.int64) * run
    return first, tl.minimum(first + run, num_rows)


@triton.jit
def tile_range(tiles, index, run, PARTS: tl.constexpr):
    """The same of `run` rows of a tile, `PARTS` programs to each tile; and the tile's expert, -1 for none."""
    entry = tiles + TILE_FIELDS * (index // PARTS)
    expert = tl.load(entry)
    first = tl.load(entry + 1).to(tl.int64) + index % PARTS * run
    end = tl.minimum(first + run, tl.load(entry + 2).to(tl.int64))
    # The other fields of an unused entry hold nothing.
    return first, tl.where(expert < 0, first, end), expert


@triton.jit
def wait_for_rows(entry, programs):
    """Wait until so many programs have counted themselves in an entry of a table of tiles, whose rows they wrote."""
    while tl.atomic_add(entry + TILE_COUNT, 0, sem="acquire") < programs:
        pass


@triton.jit
def count_program(entry):
    """Tell who waits for the rows of a tile that this program has written its part of them."""
    # All threads have written before one of them says so.
    tl.debug_barrier()
    tl.atomic_add(entry + TILE_COUNT, 1, sem="release")


@triton.jit
def exists(real, row, block_rows, MASKED: tl.constexpr):
    """Whether `row` exists: `real` has the rows of each block if MASKED, else each row's expert; None: all exist."""
    there = row >= 0
    if real is not None:
        if MASKED:
            block, inside = _in_block(row, block_rows)
            there = inside < tl.load(real + block)
        else:
            there = tl.load(real + row) >= 0
    return there


@triton.jit
def scale_offset(row, block_rows, stride_block, stride_row):
    """Where the scales of `row` begin, which is the row of its block or, in one block, of all."""
    block, inside = _in_block(row, block_rows)
    return tl.cast(block, tl.int64) * stride_block + tl.cast(inside, tl.int64) * stride_row


@triton.jit
def _in_block(row, block_rows):
    """Number of a row's block and the row's place in it; 64 bits would take a hundred instructions to divide."""
    row = tl.cast(row, tl.int32)
    block = row // block_rows
    return block, row - block * block_rows
