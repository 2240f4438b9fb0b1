"""Four-bit codes, two to a byte."""

from __future__ import annotations

from moe_core.payloads import Tensor


def pack_pairs(codes: Tensor, axis: int) -> Tensor:
    """Neighbours along `axis` in one byte, the first in the low nibble.

    Args:
        codes: int8 or uint8 `[N, K]`; the lower four bits of each count. The length along `axis` is even.
        axis: 0 pairs output rows, 1 pairs input columns.

    Returns:
        As `codes`, half as long along `axis`, contiguous.
    """
    along = codes.movedim(axis, 0)
    return ((along[0::2] & 15) | (along[1::2] << 4)).movedim(0, axis).contiguous()
