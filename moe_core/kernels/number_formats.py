"""Small number formats: the values of stored codes and scales, and rounding to them.

e4m3, e2m1 and e8m0 as in OCP Microscaling v1.0; int4 is two's complement. Two 4-bit elements share a byte, the first
in the low nibble.
"""

from __future__ import annotations

from functools import cache

import torch

from moe_core.payloads import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
#: Word of an activation dtype -> its largest code, which the largest value of a group gets; integers have one below
#: the negative of it besides.
LARGEST_CODE = {"fp8": E4M3_MAX, "int8": 127.0, "int4": 7.0, "fp4": E2M1_MAX}
#: What `e4m3_bits` are multiples of.
E4M3_BITS_UNIT = 256.0

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_INT4 = (*range(8), *range(-8, 0))

#: Word of a 4-bit weight dtype -> its 16 values.
_FOUR_BITS = {"fp4": _E2M1, "int4": _INT4}

_EXPONENT_BITS = 0x7F800000
_FRACTION_BITS = 0x007FFFFF


@cache
def byte_pairs(weight_dtype: str, device: torch.device) -> Tensor:
    """Both fp32 values of every byte as the 256 words that hold them, int64: one look-up writes two numbers."""
    values = _FOUR_BITS[weight_dtype]
    pairs = [(values[byte & 15], values[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32, device=device).view(torch.int64).flatten()


def scale_values(scale: Tensor) -> Tensor:
    """Stored scales as fp32; uint8 holds exponent bytes, `2 ** (byte - 127)`, of which 255 is NaN."""
    if scale.dtype == torch.uint8:
        return scale.view(torch.float8_e8m0fnu).float()
    if scale.dtype == torch.float8_e4m3fn and scale.device.type == "cpu" and not has_e4m3_nan(scale):
        return e4m3_bits(scale).float().mul_(E4M3_BITS_UNIT)
    return scale.float()


def e4m3_bits(values: Tensor) -> Tensor:
    """Finite e4m3 as fp16 of the same fields: the number in units of `E4M3_BITS_UNIT`, subnormal ones included.

    The sign goes to bit 15, the rest up from bit 7. The exponents' biases differ by 8, hence the unit.
    """
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    # Widening has copied the sign below itself.
    return bits.bitwise_and_(~(1 << 14)).view(torch.float16)


def has_e4m3_nan(values: Tensor) -> bool:
    """Whether a code is 0x7F or 0xFF; waits for the device."""
    return bool((values.view(torch.int8).amax() == 0x7F) | (values.view(torch.uint8).amax() == 0xFF))


def movable(values: Tensor) -> Tensor:
    """Elements of one byte as integers: not every device copies those of small floats by index."""
    return values.view(torch.uint8) if values.itemsize == 1 else values


def quotient(values: Tensor, divisor: float) -> Tensor:
    """`values / divisor`, rounded to nearest on every device.

    On a GPU, torch divides by a number through its reciprocal, which rounds twice; so the divisor is a tensor there.
    """
    return values / values.new_full((), divisor)


def power_of_two_above(values: Tensor) -> Tensor:
    """Smallest power of two that is not less, on the bits of fp32 numbers from 0; infinity of NaN, 0 of 0."""
    bits = values.view(torch.int32).clamp(max=_EXPONENT_BITS)
    return ((bits + _FRACTION_BITS) & _EXPONENT_BITS).view(torch.float32)


def power_of_two_below(values: Tensor) -> Tensor:
    """Largest power of two that is not greater, on the bits of positive fp32 numbers; 0 below `2 ** -126`."""
    return (values.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def power_of_two_scale(rows: Tensor, largest: float) -> Tensor:
    """Powers of two, fp32 `[R, 1]`: a row divided by its own has its largest size in `(largest / 2, largest]`.

    All are finite and none is zero: zeros stay zeros, infinities and NaN what they are.

    Args:
        rows: `[R, C]` of any float dtype whose numbers fp32 holds.
        largest: A power of two, one at least.
    """
    sizes = rows.abs().amax(-1, keepdim=True).float()
    return power_of_two_above(sizes * (1.0 / largest)).clamp_(2.0**-126, 2.0**127)


def round_e4m3(values: Tensor) -> Tensor:
    """Nearest e4m3 with ties to even, saturating; the cast alone would give NaN beyond the largest."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_to_e4m3(values: Tensor) -> Tensor:
    """As `round_e4m3`, but fp32: what the codes stand for, many times faster on CPU than the cast there and back."""
    clamped = values.clamp(-E4M3_MAX, E4M3_MAX)
    # Adding 1.5 * 2 ** 20 times a number's power of two leaves its three fraction bits; subnormal ones share a step.
    shift = power_of_two_below(clamped.abs()).clamp_(min=2.0**-6).mul_(1.5 * 2.0**20)
    return clamped.add_(shift).sub_(shift)


def round_e2m1(values: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with ties to the even code, saturating; fp32."""
    size = values.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return ((values / step).round() * step).clamp(-E2M1_MAX, E2M1_MAX)
