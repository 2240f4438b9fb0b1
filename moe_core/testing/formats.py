"""Number formats in float64: what stored codes mean, and what rounding to a format gives.

Written from the definitions (OCP Microscaling v1.0 for e2m1, e4m3 and e8m0; two's complement int4), apart from any
backend's code: tables and arithmetic instead of casts, so that a fault in one is not a fault in both.
"""

from __future__ import annotations

import math

import torch

from moe_core.payloads import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
_E4M3_FRACTION_BITS, _E4M3_MIN_EXPONENT = 3, -6
_E2M1_FRACTION_BITS, _E2M1_MIN_EXPONENT = 1, 0
_E8M0_BIAS, _E8M0_NAN = 127, 255


def round_to_format(values: Tensor, fraction_bits: int, min_exponent: int, largest: float) -> Tensor:
    """Nearest number of a binary float format, ties to even, saturating, gradual below `2 ** min_exponent`."""
    exact = values.double()
    _, exponent = torch.frexp(exact)
    # frexp gives a mantissa below 1, the format counts from a mantissa of 1.
    exponent = (exponent - 1).clamp(min=min_exponent)
    step = torch.ldexp(torch.ones_like(exact), exponent - fraction_bits)
    return ((exact / step).round() * step).clamp(-largest, largest)


def round_to_e4m3(values: Tensor) -> Tensor:
    """Nearest e4m3 value, saturating at 448."""
    return round_to_format(values, _E4M3_FRACTION_BITS, _E4M3_MIN_EXPONENT, E4M3_MAX)


def round_to_e2m1(values: Tensor) -> Tensor:
    """Nearest e2m1 value, saturating at 6."""
    return round_to_format(values, _E2M1_FRACTION_BITS, _E2M1_MIN_EXPONENT, E2M1_MAX)


def power_of_two_at_least(values: Tensor) -> Tensor:
    """Smallest power of two that is not below a positive value."""
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())


def power_of_two_up_to(values: Tensor) -> Tensor:
    """Largest power of two that is not above a positive value."""
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp(torch.ones_like(mantissa), exponent - 1)


def _e4m3_value(byte: int) -> float:
    """A sign, four exponent bits of bias 7, three fraction bits; no infinity, NaN where all bits are set."""
    if byte & 127 == 127:
        return math.nan
    exponent, fraction = (byte >> 3) & 15, (byte & 7) / 8
    size = math.ldexp(1.0 + fraction, exponent - 7) if exponent else math.ldexp(fraction, _E4M3_MIN_EXPONENT)
    return -size if byte >> 7 else size


_E4M3_VALUES = torch.tensor([_e4m3_value(byte) for byte in range(256)], dtype=torch.float64)


def decode_e4m3(codes: Tensor) -> Tensor:
    """float8_e4m3fn or its bytes -> values."""
    return _E4M3_VALUES.to(codes.device)[codes.view(torch.uint8).long()]


def decode_e8m0(codes: Tensor) -> Tensor:
    """Exponent bytes (or float8_e8m0fnu) -> powers of two; byte 255 is NaN."""
    exponent = codes.view(torch.uint8).long()
    powers = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - _E8M0_BIAS)
    return torch.where(exponent == _E8M0_NAN, math.nan, powers)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 `[.., N]` -> codes `[.., 2N]`, the low nibble first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()


def decode_e2m1(packed: Tensor) -> Tensor:
    """Packed e2m1 codes -> values: bit 3 is the sign."""
    codes = unpack_nibbles(packed)
    sizes = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=packed.device)
    return sizes[codes & 7] * (1.0 - 2.0 * (codes >> 3))


def encode_e2m1(values: Tensor) -> Tensor:
    """Nearest e2m1 codes, one in a byte; NaN becomes anything."""
    sizes = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=values.device)
    rounded = round_to_e2m1(values)
    code = torch.searchsorted(sizes, rounded.abs().nan_to_num(0.0))
    return (code + 8 * torch.signbit(rounded)).to(torch.uint8)


def decode_int4(packed: Tensor) -> Tensor:
    """Packed two's complement int4 -> values -8..7."""
    codes = unpack_nibbles(packed)
    return (codes - 16 * (codes >> 3)).double()


def decode(stored: Tensor, element: str) -> Tensor:
    """Float64 values of a stored tensor whose elements are `element`: a weight dtype or a scale dtype of a scheme."""
    if element in ("fp8", "e4m3"):
        return decode_e4m3(stored)
    if element == "fp4":
        return decode_e2m1(stored)
    if element == "int4":
        return decode_int4(stored)
    return decode_e8m0(stored) if element == "e8m0" else stored.double()
