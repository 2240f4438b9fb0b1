"""Small number formats: the values of stored codes and scales, and rounding to them.

e4m3, e2m1 and e8m0 as in OCP Microscaling v1.0; int4 is two's complement. Two 4-bit elements share a byte, the first
in the low nibble.
"""

from __future__ import annotations

import torch

from moe_core.payloads import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_INT4 = (*range(8), *range(-8, 0))

#: Word of a packed weight dtype -> both values `[256, 2]` of every byte.
PAIRS = {
    word: torch.tensor([(values[byte & 15], values[byte >> 4]) for byte in range(256)], dtype=torch.float32)
    for word, values in (("fp4", _E2M1), ("int4", _INT4))
}

_EXPONENT_BITS = 0x7F800000
_FRACTION_BITS = 0x007FFFFF


def scale_values(scale: Tensor) -> Tensor:
    """Stored scales as fp32; uint8 holds exponent bytes, `2 ** (byte - 127)`, of which 255 is NaN."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def power_of_two_above(values: Tensor) -> Tensor:
    """Smallest power of two that is not less, on the bits of positive fp32 numbers; at least `2 ** -126`."""
    return ((values.view(torch.int32) + _FRACTION_BITS) & _EXPONENT_BITS).view(torch.float32)


def power_of_two_below(values: Tensor) -> Tensor:
    """Largest power of two that is not greater, on the bits of positive fp32 numbers; 0 below `2 ** -126`."""
    return (values.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def round_e4m3(values: Tensor) -> Tensor:
    """Nearest e4m3 with ties to even, saturating; the cast alone would give NaN beyond the largest."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_e2m1(values: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with ties to the even code, saturating; fp32."""
    size = values.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return ((values / step).round() * step).clamp(-E2M1_MAX, E2M1_MAX)
