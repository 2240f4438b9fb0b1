"""Values to 8-bit codes and their scales, in registers: for every kernel that rounds."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.triton.interpreter import narrow


@triton.jit
def dynamic_scale(values, CODE_MAX: tl.constexpr):
    """Scale of each row of `values`: its largest absolute value, found on the bits, where NaN is above everything."""
    bits = tl.max(tl.abs(values).to(tl.int32, bitcast=True), axis=1)
    largest = bits.to(tl.float32, bitcast=True)
    return tl.div_rn(largest, tl.full(largest.shape, CODE_MAX, tl.float32))


@triton.jit
def power_of_two_above(values):
    """As `number_formats.power_of_two_above`."""
    bits = tl.minimum(values.to(tl.int32, bitcast=True), 0x7F800000)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def codes_of(values, scale, CODE_MIN: tl.constexpr, CODE_MAX: tl.constexpr, DTYPE: tl.constexpr):
    """`[GROUPS, BLOCK]` values over their groups' scales, rounded and saturating; NaN stays NaN.

    Dividing every value takes longer than reading it does. The reciprocal of a scale in two parts, the first one cut
    off, gives the code of the quotient, and the sign of a zero.
    """
    divisor = tl.where(scale == 0.0, 1.0, scale)
    # Near 1, by a power of two, no part of the reciprocal is infinite or a number of few digits.
    near = tl.where(divisor < 2.0**-64, 2.0**64, tl.where(divisor > 2.0**64, 2.0**-64, 1.0))
    divisor *= near
    one = tl.full(divisor.shape, 1.0, tl.float32)
    inverse = tl.div_rn(one, divisor)
    too_much = tl.fma(-divisor, inverse, one) < 0.0
    inverse = (inverse.to(tl.int32, bitcast=True) - too_much.to(tl.int32)).to(tl.float32, bitcast=True)
    # The reciprocal of infinity lacks nothing.
    rest = tl.where(inverse == 0.0, 0.0, tl.fma(-divisor, inverse, one) * inverse)

    shape: tl.constexpr = values.shape
    least, most = (CODE_MIN * divisor)[:, None], (CODE_MAX * divisor)[:, None]
    values = tl.clamp(values * near[:, None], least, most, propagate_nan=tl.PropagateNan.ALL)
    code = tl.fma(values, tl.broadcast_to(inverse[:, None], shape), values * rest[:, None])
    if tl.int8 == DTYPE:
        # 1.5 * 2**23: adding it leaves no fraction bits, so the sum is rounded half to even.
        code = (code + 12582912.0) - 12582912.0
        # NaN is in the scale; as an integer it would be anything.
        code = tl.where(code == code, code, 0.0)
    return narrow(code, DTYPE)


@triton.jit
def store_scales(place, scale, groups, num_groups, stride_word, PACKED: tl.constexpr):
    """Scales of a row's `groups` from `place` on: words, or the exponents' bytes in words."""
    if PACKED:
        exponent = tl.where(groups < num_groups, scale.to(tl.int32, bitcast=True) >> 23, 0)
        byte = place.to(tl.pointer_type(tl.uint8), bitcast=True) + 4 * (groups // 4).to(tl.int64) * stride_word
        tl.store(byte + groups % 4, exponent.to(tl.uint8), mask=groups < (num_groups + 3) // 4 * 4)
    else:
        tl.store(place + groups.to(tl.int64) * stride_word, scale, mask=groups < num_groups)
