"""4-bit and 8-bit codes: out of the words of checkpoints, and into canonical bytes."""

from __future__ import annotations

import torch

from moe_core.payloads import Tensor

#: Where output i of eight lies in a word of AWQ, which holds outputs 0 2 4 6 1 3 5 7.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(stored: Tensor, axis: int, bits: int, places: tuple[int, ...] = ()) -> Tensor:
    """Integers that hold several codes each -> the codes.

    Args:
        stored: Any integer dtype; each holds `8 * itemsize / bits` codes along `axis`, the first in the lowest bits.
        axis: Axis along which neighbours are packed.
        bits: 4 or 8.
        places: Where code i of a word of 4-bit codes lies, if not at i.

    Returns:
        uint8, as stored (two's complement or unsigned), `axis` longer by that factor.
    """
    # A copy in any case: a tensor with an axis of length one calls itself contiguous with any stride there.
    words = stored.movedim(axis, -1).clone(memory_format=torch.contiguous_format)
    # Little-endian memory: the lowest bits of a word are its first byte.
    octets = words.view(torch.uint8)
    if bits == 4:
        places = places or (0, 1)
        octets = octets.view(*octets.shape[:-1], -1, len(places) // 2)
        codes = octets.new_empty(*octets.shape[:-1], len(places))
        for code, place in enumerate(places):
            octet = octets[..., place // 2]
            codes[..., code] = octet >> 4 if place % 2 else octet & 15
        octets = codes.flatten(-2)
    return octets.movedim(-1, axis)


def raised(words: Tensor, bits: int) -> Tensor:
    """int32 words whose codes were stored less one (GPTQ's first format) -> those of the codes.

    Writers subtract from whole words, so that a code of 0 borrows from its neighbour; adding to whole words gives back.
    """
    return words + 0xFFFFFFFF // ((1 << bits) - 1)


def pack(codes: Tensor, axis: int = -1) -> Tensor:
    """4-bit codes, one to a byte -> two to a byte, the first of neighbours along `axis` in the low nibble.

    Args:
        codes: int8 or uint8; the lower four bits of each count. The length along `axis` is even.
        axis: Axis along which neighbours are packed.

    Returns:
        As `codes`, `axis` half as long, contiguous.
    """
    along = codes.movedim(axis, -1)
    packed = (along[..., 1::2] << 4).bitwise_or_(along[..., 0::2] & 15)
    return packed.movedim(-1, axis).contiguous()


def sign_bit(bits: int) -> int:
    """The bit that turns codes with an offset (zero in the middle) into two's complement: `u - 8 == u ^ 8` mod 16."""
    return 1 << (bits - 1)


def exponent_bytes(scales: Tensor) -> tuple[Tensor, bool]:
    """Floats that are powers of two -> their e8m0 bytes; False if some are not.

    Args:
        scales: Any float dtype, any shape.
    """
    mantissa, exponent = torch.frexp(scales.float())
    code = exponent + 126
    exact = bool(((mantissa == 0.5) & (code >= 0) & (code <= 254)).all())
    return code.clamp(0, 254).to(torch.uint8), exact
