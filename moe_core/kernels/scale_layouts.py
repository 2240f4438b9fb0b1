"""How the scales of quantized tokens lie in memory, by the words of `SCALE_LAYOUTS` that kernels here write."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from moe_core.errors import SpecError
from moe_core.payloads import Tensor
from moe_core.specs import TokenDtype

#: Rows of a column are padded to a multiple of it: 16 bytes of four-byte scales, what bulk copies need.
COLUMN_ALIGNMENT = 4
#: Exponent bytes in one word of packed scales.
PACKED_SCALES = 4


@attrs.frozen(kw_only=True)
class ScaleLayout:
    """One word of `SCALE_LAYOUTS`.

    Attributes:
        group: Channels that share a scale, 0 for all of a row.
        column_major: Whether the scales of neighbouring rows are neighbours, instead of those of neighbouring groups.
        packed: Whether scales are powers of two, stored as exponent bytes, four groups to an int32 word (the first in
            its low byte, 0 past the last group); else they are fp32.
    """

    group: int
    column_major: bool = False
    packed: bool = False

    def num_groups(self, width: int) -> int:
        """Groups of a row of `width` channels."""
        return -(-width // self.group) if self.group else 1

    def empty(self, rows: Sequence[int], width: int, device: torch.device) -> Tensor:
        """Unwritten scales of rows `[R]` or of blocks of rows `[L, M]`: shape `[*rows, groups or words]`."""
        words = self.num_groups(width)
        if self.packed:
            words = -(-words // PACKED_SCALES)
        return empty_scales(rows, words, torch.int32 if self.packed else torch.float32, device, self.column_major)


_LAYOUTS = {
    "row_128": ScaleLayout(group=128),
    "column_128": ScaleLayout(group=128, column_major=True),
    "ue8m0_128": ScaleLayout(group=128, column_major=True, packed=True),
    "token": ScaleLayout(group=0),
}
#: Word of a token dtype -> what its codes are stored in.
CODE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def code_format(token_dtype: TokenDtype) -> tuple[torch.dtype, ScaleLayout]:
    """What codes and scales of `token_dtype` are stored as.

    Raises:
        SpecError: No kernel here writes it.
    """
    codes, layout = CODE_DTYPES.get(token_dtype.dtype), _LAYOUTS.get(token_dtype.scales)
    if codes is None or layout is None:
        known = f"{', '.join(CODE_DTYPES)} with scales {', '.join(_LAYOUTS)}"
        raise SpecError(f"rows cannot be quantized to {token_dtype}; known: {known}")
    return codes, layout


def empty_scales(
    rows: Sequence[int], words: int, dtype: torch.dtype, device: torch.device, column_major: bool
) -> Tensor:
    """Unwritten `[*rows, words]`; column-major ones have stride 1 along the last axis of `rows`, padded to 16 bytes."""
    if not column_major:
        return torch.empty((*rows, words), dtype=dtype, device=device)
    *blocks, count = rows
    padded = -(-count // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    return torch.empty((*blocks, words, padded), dtype=dtype, device=device).transpose(-1, -2)[..., :count, :]


def block_strides(scales: Tensor) -> tuple[int, int, int, int]:
    """Rows per block, and the strides of block, row and word, of scales `[R, words]` (one block) or `[L, M, words]`."""
    *blocks, row, word = scales.stride()
    return max(1, scales.shape[-2]), blocks[0] if blocks else 0, row, word
