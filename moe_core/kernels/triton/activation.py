"""Every variant of `ActivationSpec` in fp32 registers, for the epilogue of a GEMM or as a kernel of its own."""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl
from triton.language.extra import libdevice

from moe_core.activation import ActivationSpec
from moe_core.errors import SpecError
from moe_core.kernels.triton.interpreter import INTERPRETED, narrow, wide
from moe_core.kernels.triton.launch import Constants, Launches, divided_up, looked_at, power_of_two
from moe_core.kernels.triton.rows import exists, flat_rows, row_range, rows_per_program
from moe_core.payloads import Tensor

#: Columns of one program.
_BLOCK = 1024
_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def activation_constants(spec: ActivationSpec | None) -> dict[str, object]:
    """Compile-time arguments of `activate` for one variant; None gives the identity.

    Raises:
        SpecError: A kind that is no formula (`module`).
    """
    if spec is None:
        return {"KIND": "identity", "GATED": False, "ALPHA": 1.0, "LIMIT": None, "BETA": 0.0, "CLAMP_AFTER": False}
    if spec.kind not in _KINDS:
        raise SpecError(f"activation kind {spec.kind!r} has no kernel; known: {', '.join(_KINDS)}")
    return {
        "KIND": spec.kind,
        "GATED": spec.gated,
        "ALPHA": spec.alpha,
        "LIMIT": spec.limit,
        "BETA": spec.beta,
        "CLAMP_AFTER": spec.clamp == "after",
    }


def activate_rows(hidden: Tensor, spec: ActivationSpec, *, real: Tensor | None = None) -> Tensor:
    """As `ops.activate`; rows that do not exist are neither read nor written."""
    width = hidden.shape[-1] // spec.rows_per_channel
    out = hidden.new_empty((*hidden.shape[:-1], width))
    flat, real = flat_rows(hidden), None if real is None else real.contiguous()
    num_rows, stride, block = flat.shape[0], flat.stride(0), min(_BLOCK, power_of_two(width))
    if num_rows:
        run = rows_per_program(num_rows, real)
        unit = spec, hidden.dim() == 3, block
        # The output is new, and therefore aligned.
        key = unit, looked_at(flat, real, width, stride)
        arguments = flat, out, real, width, stride, run, num_rows, hidden.shape[-2]
        grid = divided_up(num_rows, run), divided_up(width, block), 1
        _launches(key, grid, arguments, partial(_constants, *unit))
    return out


def _constants(spec: ActivationSpec, masked: bool, block: int) -> Constants:
    rows = {"MASKED": masked, "BLOCK": block, "INTERLEAVED": spec.row_order == "interleaved"}
    return {**rows, **activation_constants(spec)}, {"enable_fp_fusion": False}


@triton.jit
def _times_sigmoid(x, z):
    """`x * sigmoid(z)`, to some units in the last place of fp32; 0 where the logistic function is below 2**-126."""
    if INTERPRETED:
        # NumPy warns of exponentials that overflow.
        return x * tl.where(z < -87.0, 0.0, tl.sigmoid(tl.maximum(z, -87.0)))
    # Exponentials and quotients that look out for numbers below those bounds take three times as many instructions.
    return libdevice.fast_dividef(x, 1.0 + libdevice.fast_expf(-z))


@triton.jit
def _function(x, KIND: tl.constexpr, ALPHA: tl.constexpr):
    """The element-wise function; comparisons are written so that NaN stays NaN."""
    if KIND == "silu":
        x = _times_sigmoid(x, ALPHA * x)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # 1 + tanh(z) = 2 * sigmoid(2 z), with z = sqrt(2 / pi) * (x + 0.044715 x^3).
        x = _times_sigmoid(x, 1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    elif KIND == "relu2":
        x = tl.where(x < 0.0, 0.0, x)
        x = x * x
    return x


@triton.jit
def activate(
    gate,
    up,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BETA: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
):
    """`ActivationSpec`'s formula on fp32 values; `up` is not looked at when not gated."""
    if GATED:
        if LIMIT is not None:
            if not CLAMP_AFTER:
                gate = tl.where(gate > LIMIT, LIMIT, gate)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        if BETA != 0.0:
            up = up + BETA
        if KIND == "relu2" and not CLAMP_AFTER:
            # The square alone may exceed fp32 beside an up half that is small.
            root = tl.where(gate < 0.0, 0.0, gate)
            value = root * up * root
        else:
            value = _function(gate, KIND, ALPHA)
            if CLAMP_AFTER:
                value = tl.where(value > LIMIT, LIMIT, value)
            value = value * up
    else:
        value = _function(gate, KIND, ALPHA)
    return value


@triton.jit
def load_activated(
    row_ptr,
    columns,
    width,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BETA: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
):
    """The activation's `columns` of one row in fp32; anything past `width`."""
    mask = columns < width
    if GATED:
        first = 2 * columns if INTERLEAVED else columns
        second = first + 1 if INTERLEAVED else columns + width
        gate = wide(tl.load(row_ptr + first, mask=mask, other=0.0))
        up = wide(tl.load(row_ptr + second, mask=mask, other=0.0))
    else:
        gate = wide(tl.load(row_ptr + columns, mask=mask, other=0.0))
        up = gate
    return activate(gate, up, KIND, GATED, ALPHA, LIMIT, BETA, CLAMP_AFTER)


@triton.jit(do_not_specialize=["run", "num_rows", "block_rows"])
def _activate_rows(
    hidden,
    out,
    real,
    width,
    stride,
    run,
    num_rows,
    block_rows,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BETA: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
):
    first, end = row_range(tl.program_id(0), run, num_rows)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for row in range(first, end):
        if exists(real, row, block_rows, MASKED):
            value = load_activated(
                hidden + row * stride, columns, width, INTERLEAVED, KIND, GATED, ALPHA, LIMIT, BETA, CLAMP_AFTER
            )
            tl.store(out + row * width + columns, narrow(value, out.dtype.element_ty), mask=columns < width)


_launches = Launches(_activate_rows)
