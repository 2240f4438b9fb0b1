"""Weights of int4 in planes: the codes at one place of 16 neighbouring words are one step of a matrix instruction.

A word has eight codes of neighbouring columns. A matrix instruction wants those of two columns from each thread, and to
bring codes to the threads that need them, through shared memory and behind a barrier, takes longer than to decode them.
Here no code moves: the rows that are multiplied have their columns in another order instead. Of each 128 columns, which
are 16 words, column `c` is at place `c % 8 * 16 + c // 8`, so that the first codes of all words belong to the first 16
places, the second ones to the next, and so on. Codes are multiplied as they are, which bf16 holds exactly, and scales
multiply the sums of 128 columns, in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.triton.interpreter import INTERPRETED, as_operand, narrow
from moe_core.kernels.triton.launch import Launches, divided_up, looked_at
from moe_core.kernels.triton.rows import flat_rows
from moe_core.kernels.triton.weights import scale_values
from moe_core.payloads import Tensor

#: Columns that a program of `rows_in_planes` copies.
_BLOCK = 1024


def _instructions(has_zero: bool) -> str:
    """PTX from two words to eight registers, each with the two codes of one place; zero points come after the words.

    With its sign bit flipped a code counts from -8. 0x4300 is 128 in bf16, whose last fraction bits count ones, and all
    integers up to 256 are numbers of bf16, so that nothing rounds.
    """
    # The lower halves of neighbouring words, which have their first four codes, side by side, and the upper halves.
    lines = [".reg .b32 low, high, t", "prmt.b32 low, $8, $9, 0x5410", "prmt.b32 high, $8, $9, 0x7632"]
    lines += [".reg .b32 origin", "mov.b32 origin, " + ("0x43004300" if has_zero else "0x43084308")]
    for place in range(8):
        lines += [
            f"shr.b32 t, {'low' if place < 4 else 'high'}, {4 * (place % 4)}",
            # (t & mask) ^ flipped
            "lop3.b32 t, t, 0x000F000F, 0x43084308, 0x6A",
            f"sub.rn.bf16x2 ${place}, t, origin",
        ]
        if has_zero:
            lines.append(f"sub.rn.bf16x2 ${place}, ${place}, $10")
    return "{ " + ";\n".join(lines) + "; }"


# Values, not functions of constants: torch's compiler copies kernels with what they name, and not all releases those.
_CODES, _CODES_LESS_ZEROS = tl.constexpr(_instructions(False)), tl.constexpr(_instructions(True))
#: Eight results, which are written before the last input is read, and two or three inputs.
_OF_TWO, _OF_THREE = (tl.constexpr(",".join(["=&r"] * 8 + ["r"] * count)) for count in (2, 3))


@triton.jit
def place_in_planes(columns):
    """Where these columns are in the order of planes."""
    return columns // 128 * 128 + columns % 8 * 16 + columns % 128 // 8


@triton.jit
def add_planes(
    acc,
    rows,
    x,
    there,
    scales,
    zeros,
    num_inputs,
    stride_scale,
    stride_zero,
    GROUP: tl.constexpr,
):
    """`acc + w @ x.T` of int4 weights, and rows whose columns are in the order of planes.

    Args:
        acc: fp32 `[BW, BM]`, of `BW` weight rows and `BM` rows.
        rows: Pointers `[BW]` to the first words of weight rows.
        x: Pointers `[BM]` to bf16 rows.
        there: `[BM]`, the rows that exist.
        scales: Pointers `[BW]` to each weight row's first scale, or None.
        zeros: The same of int8 zero points.
        num_inputs: A multiple of 128.
        stride_scale: From one scale to the next.
        stride_zero: The same of zero points.
        GROUP: Columns that share a scale, a multiple of 128, or 0 for all.
    """
    scale = None
    zero = None
    # The next step's are loaded before the product, which hides the wait for them.
    if scales is not None:
        scale = tl.load(scales)
    if zeros is not None:
        zero = tl.load(zeros)
    word = tl.arange(0, 16)
    for k in range(0, num_inputs, 128):
        planes = _codes(tl.load(rows[:, None] + (word + k // 8)[None, :]), zero)
        factor = 1.0 if scale is None else scale_values(scale)[:, None]
        if GROUP > 0:
            group = tl.minimum(k + 128, num_inputs - 128) // GROUP
            if scales is not None:
                scale = tl.load(scales + group * stride_scale)
            if zeros is not None:
                zero = tl.load(zeros + group * stride_zero)
        sums = acc if scales is None else tl.zeros_like(acc)
        for place in tl.static_range(8):
            x_tile = tl.load(x[:, None] + (word + k + place * 16)[None, :], mask=there[:, None], other=0.0)
            sums = tl.dot(planes[place], tl.trans(as_operand(x_tile)), sums)
        acc = sums if scales is None else acc + sums * factor
    return acc


@triton.jit
def _codes(words, zero):
    """`[rows, 16]` words -> eight operands of that shape, less the zero points `[rows]` (or None)."""
    if INTERPRETED:
        planes = _codes_by_numbers(words, zero)
    elif zero is None:
        planes = tl.inline_asm_elementwise(_CODES, _OF_TWO, [words], (tl.bfloat16,) * 8, is_pure=True, pack=2)
    else:
        # Zero points count from -8 as well.
        offset = tl.broadcast_to((zero.to(tl.float32) + 8.0).to(tl.bfloat16)[:, None], words.shape)
        inputs = [words, offset]
        planes = tl.inline_asm_elementwise(
            _CODES_LESS_ZEROS, _OF_THREE, inputs, (tl.bfloat16,) * 8, is_pure=True, pack=2
        )
    return planes


@triton.jit
def _codes_by_numbers(words, zero):
    """`_codes` without the instructions of a GPU, for its interpreter."""
    a = _code(words, 0, zero)
    b = _code(words, 4, zero)
    c = _code(words, 8, zero)
    d = _code(words, 12, zero)
    e = _code(words, 16, zero)
    f = _code(words, 20, zero)
    g = _code(words, 24, zero)
    h = _code(words, 28, zero)
    return a, b, c, d, e, f, g, h


@triton.jit
def _code(words, AT: tl.constexpr, zero):
    code = (((words >> AT) & 15) ^ 8).to(tl.float32) - 8.0
    if zero is not None:
        code -= zero.to(tl.float32)[:, None]
    return as_operand(narrow(code, tl.bfloat16))


def rows_in_planes(rows: Tensor, *, pdl: bool = False) -> Tensor:
    """Rows with their columns in the order of planes.

    Args:
        rows: `[R, C]`, `C` a multiple of 128, of any dtype.
        pdl: Start before the launch in front has ended (see the package), and wait for it before anything is written;
            it may not write `rows`.
    """
    rows = flat_rows(rows)
    num_rows, width = rows.shape
    out = rows.new_empty((num_rows, width))
    sizes = width, rows.stride(0)
    key = pdl, looked_at(rows, out, *sizes)
    grid = num_rows, divided_up(width, _BLOCK), 1
    _launches(key, grid, (rows, out, *sizes), lambda: ({"BLOCK": _BLOCK, "PDL": pdl}, {"launch_pdl": pdl}))
    return out


@triton.jit
def _rows_in_planes(rows, out, width, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < width
    values = tl.load(rows + row * stride + columns, mask=there)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + row * width + place_in_planes(columns), values, mask=there)


_launches = Launches(_rows_in_planes)
