"""What differs under Triton's interpreter (`TRITON_INTERPRET=1`), which runs these kernels on a CPU for tests."""

from __future__ import annotations

import os

import triton
import triton.language as tl

#: Triton decides when a kernel is decorated, so this is fixed at import too.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def as_operand(x):
    """`x` as an operand of `tl.dot`: the interpreter keeps bf16 as bit patterns and would multiply those."""
    if INTERPRETED and x.dtype.is_floating():
        x = wide(x)
    return x


@triton.jit
def wide(x):
    """`x` in fp32; the interpreter loses bf16's numbers below the normal ones, and makes numbers of NaN in fp8."""
    values = x.to(tl.float32)
    if INTERPRETED:
        if tl.bfloat16 == x.dtype:
            values = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        elif tl.float8e4nv == x.dtype:
            values = tl.where((x.to(tl.int8, bitcast=True) & 127) == 127, float("nan"), values)
    return values


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """fp32 `x` in `DTYPE`, rounded half to even; the interpreter cuts bf16 off, and loses carry and NaN of fp8."""
    if INTERPRETED:
        if tl.bfloat16 == DTYPE:
            bits = _keep_bits(x, 16).to(tl.int32, bitcast=True) >> 16
            x = tl.where(x == x, bits, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
        elif tl.float8e4nv == DTYPE:
            # Below 2**-6 the steps are 2**-9; adding and taking away 1.5 * 2**23 leaves whole steps.
            steps = (x * 512.0 + 12582912.0) - 12582912.0
            codes = tl.where(tl.abs(x) < 0.015625, steps * 0.001953125, _keep_bits(x, 20)).to(DTYPE)
            x = tl.where(x == x, codes.to(tl.int8, bitcast=True), 127).to(DTYPE, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _keep_bits(x, DROPPED: tl.constexpr):
    """`x` without its last `DROPPED` fraction bits, rounded half to even."""
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    return ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
