"""Operands as FlashInfer's NVFP4 kernels read them: pure functions.

Shapes: leading axis `L` counts experts, `N` rows (outputs), `K'` block scales of a row, one for each 16 inputs. The
same functions order the rows of codes and of their block scales.

Sources: the 128x4 layout of block scales is that of cuBLAS and CUTLASS for `tcgen05.mma` (NVIDIA, cuBLAS manual,
"1D block scaling factors layout"); views and the order of rows are FlashInfer's (`cute_dsl/utils.py`, wrapper of its
CuteDSL MoE, 0.6.11 and 0.7.2).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from moe_core.errors import WeightsError
from moe_core.payloads import Tensor

#: Rows and block scales of one tile of 512 bytes, and the rows between two neighbours in it.
TILE_ROWS, TILE_COLUMNS, _TILE_STEP = 128, 4, 32
#: Rows of one half before as many of the other.
TURN = 64
#: Axes of `[L, N/128, K'/4, 32, 4, 4]` in the order of the MMA view.
_MMA_AXES = (3, 4, 1, 5, 2, 0)


def swizzled_shape(rows: int, columns: int) -> tuple[int, int]:
    """`(N, K')` filled up to whole tiles."""
    return rows + -rows % TILE_ROWS, columns + -columns % TILE_COLUMNS


def swizzle(scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Bring block scales into tiles of 128 rows and 4 columns.

    The scale of row `n` and column `k` lies at byte
    `((n // 128) * (K'_pad / 4) + k // 4) * 512 + (n % 32) * 16 + ((n % 128) // 32) * 4 + k % 4` of its expert.

    Args:
        scales: `[L, N, K']` of one byte each, any strides.
        out: `[L, N_pad, K'_pad]` of the same dtype, contiguous, to be filled; None makes it.

    Returns:
        `[L, N_pad, K'_pad]`; what fills up `N` to 128 and `K'` to 4 is zero.
    """
    count, *size = scales.shape
    rows, columns = swizzled_shape(*size)
    if out is None:
        out = scales.new_empty((count, rows, columns))
    # Four neighbours of a row stay together: one word to copy instead of four bytes. Padding is a copy, of any strides.
    padded = functional.pad(scales.view(torch.uint8), (0, columns - size[1], 0, rows - size[0])).contiguous()
    places = _tiles(out)
    places.copy_(padded.view(torch.int32).view(places.shape))
    return out


def _tiles(swizzled: Tensor) -> Tensor:
    """Swizzled `[L, N, K']` as int32 `[L, N/128, 4, 32, K'/4]`, which counts rows and columns as they were; a view."""
    count, rows, columns = swizzled.shape
    shape = (count, rows // TILE_ROWS, columns // TILE_COLUMNS, _TILE_STEP, TILE_ROWS // _TILE_STEP)
    return swizzled.view(torch.int32).view(shape).permute(0, 1, 4, 3, 2)


def mma_view(swizzled: Tensor) -> Tensor:
    """Swizzled `[L, N, K']` as `(32, 4, N/128, 4, K'/4, L)`: a view that must not be made contiguous."""
    count, rows, columns = swizzled.shape
    tiles = (count, rows // TILE_ROWS, columns // TILE_COLUMNS, _TILE_STEP, TILE_ROWS // _TILE_STEP, TILE_COLUMNS)
    return swizzled.view(tiles).permute(_MMA_AXES)


def interleave(halves: Tensor) -> Tensor:
    """Rows [first; second] of `[L, 2I, ...]` in turns: 64 of the first half, 64 of the second, 64 of the first, ...

    Not idempotent: doing it twice mixes rows.

    Raises:
        WeightsError: I is no multiple of 64.
    """
    count, size = halves.shape[:2]
    if size % (2 * TURN):
        raise WeightsError(
            f"gate and up rows take turns of {TURN}: halves of {size / 2:g} rows cannot; choose another tp_size"
        )
    turns = halves.reshape(count, 2, size // (2 * TURN), TURN, *halves.shape[2:]).transpose(1, 2)
    return turns.reshape(halves.shape)


def swap_halves(halves: Tensor) -> Tensor:
    """Rows [first; second] of `[L, 2I, ...]` as [second; first]; its own inverse."""
    return halves.roll(halves.shape[1] // 2, 1)


def wrapper_rows(count: int) -> Tensor:
    """int64 `[2I]`: which row of [gate; up] lies where in the order of the CuteDSL wrapper, up before gate in turns."""
    return interleave(swap_halves(torch.arange(count)[None]))[0]
