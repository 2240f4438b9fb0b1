"""The vendor's tiled memory on the CPU: what a storage holds, how it lies there, and how it is read.

FRACTAL_NZ cuts the last two axes `[A, B]` into tiles of 16 rows by 32 bytes. With `c0` elements in 32 bytes, element
`(a, b)` lies at `[b // c0, a // 16, a % 16, b % c0]` of `[B / c0, A / 16, 16, c0]`. On an NPU a storage knows its
format and the shape that it was made with; views of it (transposed, other dtype) know only their strides. So it is
here: the note is kept at the storage, and whatever reads a tensor goes through `values`.
"""

from __future__ import annotations

import math

import attrs
import torch

from moe_core.payloads import Tensor

ND, NZ = 2, 29
#: Rows and bytes of a tile.
TILE_ROWS, TILE_BYTES = 16, 32
_NOTE = "_ascend_emulation_format"


@attrs.frozen
class Tiled:
    """The note at a storage in tiles: the shape and dtype of the tensor that was laid out."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def fits_tiles(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the last two axes are whole tiles."""
    return len(shape) >= 2 and shape[-2] % TILE_ROWS == 0 and shape[-1] * dtype.itemsize % TILE_BYTES == 0


def tiles(matrix: Tensor) -> Tensor:
    """`[.., A, B]` -> the same elements in the order of the tiles, `[.., B / c0, A / 16, 16, c0]`, contiguous."""
    *lead, rows, columns = matrix.shape
    width = TILE_BYTES // matrix.dtype.itemsize
    cut = matrix.reshape(*lead, rows // TILE_ROWS, TILE_ROWS, columns // width, width)
    return cut.movedim(-2, -4).contiguous()


def untiled(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `tiles`: elements in their order in memory -> `[.., A, B]`, contiguous."""
    *lead, rows, columns = shape
    width = TILE_BYTES // flat.dtype.itemsize
    cut = flat.reshape(*lead, columns // width, rows // TILE_ROWS, TILE_ROWS, width)
    return cut.movedim(-4, -2).reshape(shape)


def note_of(tensor: Tensor) -> Tiled | None:
    """How the tensor's storage is tiled, None if it is not."""
    return getattr(tensor.untyped_storage(), _NOTE, None)


def annotate(tensor: Tensor, note: Tiled) -> Tensor:
    """Say at the storage of `tensor` that its elements lie in tiles; gives the tensor back."""
    setattr(tensor.untyped_storage(), _NOTE, note)
    return tensor


def values(tensor: Tensor) -> Tensor:
    """The numbers that an operator reads: of a tiled storage by its layout, else the tensor itself.

    A view's strides and offset count elements of the tensor that was laid out, not places in memory.
    """
    note = note_of(tensor)
    if note is None:
        return tensor
    whole = torch.empty(0, dtype=note.dtype).set_(tensor.untyped_storage())[: math.prod(note.shape)]
    plain = untiled(whole, note.shape).view(-1).view(tensor.dtype)
    return plain.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def int4_values(words: Tensor) -> Tensor:
    """int32 `[.., C / 8]` -> int8 `[.., C]`: eight two's complement nibbles in a word, the lowest first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (words[..., None] >> shifts) & 15
    return ((nibbles ^ 8) - 8).to(torch.int8).flatten(-2)


def int4_words(codes: Tensor) -> Tensor:
    """The inverse of `int4_values`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64)
    parts = (codes.to(torch.int64) & 15).view(*codes.shape[:-1], -1, 8) << shifts
    word = parts.sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
