"""Memory as the library's kernels see it: an address, from which they read and write by their own index arithmetic.

Operands are passed on as raw pointers. Shapes tell sizes; strides tell nothing. So it is here: every operand is read
from where it begins, whatever its view says, and one in another order than the kernel expects gives other numbers.
"""

from __future__ import annotations

import functools
import math

import torch

from moe_core.payloads import Tensor

#: Rows and block scales of a tile: 128 rows by 4 scales in 512 bytes.
TILE_ROWS, TILE_SCALES, TILE_BYTES = 128, 4, 512
#: Elements that share a block scale.
BLOCK = 16


class UndefinedBehaviour(RuntimeError):
    """What the library does not check and a kernel would answer with any memory, or with a fault."""


def at_address(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], align: int = 16) -> Tensor:
    """What a kernel finds from the address of `tensor` on: a contiguous `shape` of `dtype`, the same memory.

    Args:
        tensor: Any view; its shape, strides and dtype are not asked.
        dtype: How the kernel reads the bytes.
        shape: How many it reads.
        align: Bytes that the address is promised to be a multiple of.

    Raises:
        UndefinedBehaviour: The memory ends before, or the address is not aligned.
    """
    start = tensor.storage_offset() * tensor.itemsize
    size, storage = math.prod(shape) * dtype.itemsize, tensor.untyped_storage()
    if start + size > storage.nbytes():
        raise UndefinedBehaviour(
            f"an illegal memory access: {size} bytes are read from a tensor {list(tensor.shape)} {tensor.dtype}, "
            f"whose memory has {storage.nbytes() - start} left"
        )
    if size and tensor.data_ptr() % align:
        raise UndefinedBehaviour(
            f"a misaligned address: a tensor begins at {tensor.data_ptr() % align} of {align} bytes"
        )
    found = torch.empty(0, dtype=torch.uint8).set_(storage, start, (size,))  # type: ignore[call-overload]
    return found.view(dtype).view(shape)  # type: ignore[no-any-return]


def swizzled_shape(rows: int, channels: int) -> tuple[int, int]:
    """Rows and block scales of whole tiles, for a matrix of `rows` by `channels`."""
    scales = -(-channels // BLOCK)
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-scales // TILE_SCALES) * TILE_SCALES


@functools.lru_cache(maxsize=64)
def swizzled_places(rows: int, channels: int) -> Tensor:
    """Byte at which each block scale lies in the 128x4 layout: int64 `[rows, channels / 16]`.

    Tiles follow each other along a row. Inside one, 32 lines of 16 bytes hold four rows each, 32 apart, of four scales.
    """
    row, scale = torch.arange(rows)[:, None], torch.arange(-(-channels // BLOCK))
    tiles_in_row = swizzled_shape(rows, channels)[1] // TILE_SCALES
    tile = (row // TILE_ROWS) * tiles_in_row + scale // TILE_SCALES
    return tile * TILE_BYTES + (row % 32) * 16 + (row % TILE_ROWS) // 32 * 4 + scale % TILE_SCALES


def unswizzled(tiles: Tensor, rows: int, channels: int) -> Tensor:
    """Block scales `[rows, channels / 16]` out of the memory of one matrix, in its dtype."""
    return tiles.reshape(-1).view(torch.uint8)[swizzled_places(rows, channels)].view(tiles.dtype)
