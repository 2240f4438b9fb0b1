"""Stored weights of one projection, and how a tile of them becomes an operand."""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_core.kernels.triton.interpreter import INTERPRETED, as_operand, narrow, wide
from moe_core.kernels.triton.launch import is_aligned
from moe_core.payloads import Tensor

#: Sizes of scales of int4 are below it: they are multiplied by up to 2**22 (`_int4`). e2m1 takes all that fp32 has.
#: Reading codes as fractions beside a power of two would lift this, with an instruction more for each code.
INT4_SCALE_LIMIT = 2.0**106


@attrs.define(eq=False, kw_only=True)
class GroupedWeight:
    """The weights of one projection of all local experts, as a grouped GEMM reads them.

    Attributes:
        data: `[L, N, C]` as stored, any strides (4-bit: uint8 `[L, N, C / 2]`, the first value in the low nibble), or
            panels `[L, N / rows, C / columns, rows, columns]`, contiguous, gate and up rows in turns (`panels`).
        packing: `plain`, `int4` (two's complement) or `e2m1`.
        bias: `[L, N]` or None.
        scale: `[L, N / rows, C / columns]` as `block` says, None where no scale is needed inside a row; of int4 below
            `INT4_SCALE_LIMIT`.
        block: (rows, columns) of the weight that share a scale; columns 0 means all.
        zero_point: int8 of the same shape, `[L, N, 1]` without `scale`, subtracted from the stored integers, or None.
        row_scale: `[L, N]` fp32, contiguous, what multiplies the outputs, or None.
    """

    data: Tensor
    packing: str = "plain"
    bias: Tensor | None = None
    scale: Tensor | None = None
    block: tuple[int, int] = (1, 0)
    zero_point: Tensor | None = None
    row_scale: Tensor | None = None
    _descriptors: dict[tuple[int, int, int, bool], TensorDescriptor] = attrs.field(factory=dict, init=False)

    @property
    def panel_rows(self) -> int:
        """Rows of a panel, 0 without panels."""
        return self.data.shape[3] if self.data.dim() == 5 else 0

    @property
    def panel_columns(self) -> int:
        """Columns of a panel, 0 without panels."""
        return self.data.shape[4] if self.data.dim() == 5 else 0

    @property
    def num_rows(self) -> int:
        """Rows `N` of each expert."""
        return self.data.shape[1] * max(1, self.panel_rows)

    @property
    def num_inputs(self) -> int:
        """Width `C` of the input rows."""
        return self.data.shape[2] * max(1, self.panel_columns) * (1 if self.packing == "plain" else 2)

    def takes_descriptors(self) -> bool:
        """Whether the bulk copy engine can read the weights."""
        return self.packing == "plain" and takes_descriptor(self.data)

    def descriptor(self, n: int, k: int, halves: int, interleaved: bool) -> TensorDescriptor:
        """The weights as `[L, N / halves, halves, C]` in tiles of `[1, n, halves, k]`, made once per tile.

        Panels are `[L * N / rows, C / columns, rows, columns]`, in tiles of as many of them, or rows of one, as hold
        `n * halves` rows; `k` is their columns.
        """
        key = (n, k, halves, interleaved)
        if key not in self._descriptors:
            self._descriptors[key] = (
                self._panel_descriptor(n * halves, k) if self.panel_rows else self._row_descriptor(*key)
            )
        return self._descriptors[key]

    def _panel_descriptor(self, rows: int, k: int) -> TensorDescriptor:
        data = self.data.flatten(0, 1)
        box = [max(1, rows // self.panel_rows), 1, min(rows, self.panel_rows), k]
        return TensorDescriptor(data, [*data.shape], [*data.stride()], box)

    def _row_descriptor(self, n: int, k: int, halves: int, interleaved: bool) -> TensorDescriptor:
        experts, rows, columns = self.data.shape
        by_expert, by_row, _ = self.data.stride()
        width = rows // halves
        within = (halves * by_row, by_row) if interleaved else (by_row, width * by_row)
        return TensorDescriptor(
            self.data, [experts, width, halves, columns], [by_expert, *within, 1], [1, n, halves, k]
        )

    def takes_planes(self) -> bool:
        """Whether bf16 rows can be multiplied in planes (`moe_core.kernels.triton.planes`), 128 columns at a time."""
        is_worded = self.packing == "int4" and self.stored().dtype == torch.int32
        return is_worded and self.block[1] % 128 == 0 and self.num_inputs % 128 == 0

    def stored(self) -> Tensor:
        """What a kernel reads: `data`, 4-bit codes in words of eight (int32 `[L, N, C / 8]`) where these can be had."""
        data, (_, group) = self.data, self.block
        *outer, last = data.stride()
        # Words lie on four bytes, and none holds codes of two groups.
        places = (data.shape[2], data.data_ptr(), *outer)
        if self.packing == "plain" or last != 1 or group % 8 or any(place % 4 for place in places):
            return data
        return data.view(torch.int32)


def takes_descriptor(tensor: Tensor) -> bool:
    """Whether the bulk copy engine can read it: unit stride along the last axis, everything else on 16 bytes."""
    *outer, last = tensor.stride()
    size = tensor.element_size()
    return last == 1 and is_aligned(tensor) and all(stride * size % 16 == 0 for stride in outer)


def strides_of(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    """The first `count` strides, 0 for those that a tensor (or None) does not have."""
    strides = () if tensor is None else tensor.stride()
    return (*strides, *[0] * count)[:count]


@triton.jit
def load_tile(pointers, columns, num_inputs, EVEN_K: tl.constexpr):
    """`[rows, BK]` values at `pointers`, 0 past the last input."""
    if EVEN_K:
        return tl.load(pointers)
    return tl.load(pointers, mask=columns[None, :] < num_inputs, other=0.0)


@triton.jit
def _int4(codes, AT: tl.constexpr, zero, scale):
    """The four bits from bit `AT` on, less `zero`, times `scale`: read as a tiny fp32 number, nothing is converted.

    A conversion of an integer takes as long as eight products.
    """
    tiny = (codes & (15 << AT)).to(tl.float32, bitcast=True)
    # `tiny` is the code times 2**(AT - 149); times 2**127 it is the code times UNIT. Only the last product rounds.
    UNIT: tl.constexpr = 2.0 ** (AT - 22)
    return tl.fma(tiny, tl.full(tiny.shape, 2.0**127, tl.float32), zero * -UNIT) * (scale * (1 / UNIT))


@triton.jit
def _int4s(words, zero, scale, CODES: tl.constexpr):
    """`[..., n]` words of two or eight codes in two's complement -> `[..., n, 2]` or `[..., n, 2, 2, 2]`."""
    # 0x88888888 as int32. With the sign bit flipped, codes count from -8.
    words ^= -0x77777778
    # A single return: Triton compiles what stands behind an early one too, and its result has another shape.
    if CODES == 2:
        values = tl.join(_int4(words, 0, zero, scale), _int4(words, 4, zero, scale))
    else:
        # From bit 20 on a code would reach into the exponent.
        high = words >> 12
        values = _woven(
            _int4(words, 0, zero, scale),
            _int4(words, 4, zero, scale),
            _int4(words, 8, zero, scale),
            _int4(words, 12, zero, scale),
            _int4(words, 16, zero, scale),
            _int4(high, 8, zero, scale),
            _int4(high, 12, zero, scale),
            _int4(high, 16, zero, scale),
        )
    return values


@triton.jit
def _e2m1_pair(words, AT: tl.constexpr, scale, DTYPE: tl.constexpr):
    """Codes of four bits from bits `AT` and `AT + 16` on -> two of 0, 0.5, 1, 1.5, 2, 3, 4, 6, signed by their bit 3.

    Sign, exponent and fraction are put where bf16 has its own; the biases differ by 126. Both are multiplied by
    `scale`, which is of `DTYPE`, bf16 or fp32.
    """
    # As int32, -0x7FFF8000 is 0x80008000, the sign bits, and -0x10000 is 0xFFFF0000; the factor is 2**126.
    signs = words << (12 - AT)
    bits = (signs & -0x7FFF8000) | ((signs >> 6) & 0x01C001C0)
    if tl.bfloat16 == DTYPE:
        # Neighbours in a word, which one instruction multiplies together.
        low = (bits & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        low = (bits << 16).to(tl.float32, bitcast=True)
        high = (bits & -0x10000).to(tl.float32, bitcast=True)
    return low * 8.507059173023462e37 * scale, high * 8.507059173023462e37 * scale


@triton.jit
def _e2m1s(words, scale, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """`[..., n]` words of two or eight codes -> `[..., n, 2]` or `[..., n, 2, 2, 2]`, times `scale`, in `DTYPE`."""
    first, fifth = _e2m1_pair(words, 0, scale, DTYPE)
    second, sixth = _e2m1_pair(words, 4, scale, DTYPE)
    if CODES == 2:
        values = tl.join(first, second)
    else:
        third, seventh = _e2m1_pair(words, 8, scale, DTYPE)
        fourth, eighth = _e2m1_pair(words, 12, scale, DTYPE)
        values = _woven(first, second, third, fourth, fifth, sixth, seventh, eighth)
    return values


@triton.jit
def _scaled_e2m1s(words, scale, factor, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """`_e2m1s` times `factor`, the values of the stored `scale` (or None), for operands of `DTYPE`."""
    # A code has two bits, such a scale eight at most: fp32 has the whole product, and what is rounded to bf16 then is
    # what bf16 makes of it at once.
    IS_SHORT: tl.constexpr = (
        scale is None or scale.dtype == tl.uint8 or scale.dtype == tl.float8e4nv or scale.dtype == tl.bfloat16
    )
    # The interpreter cannot multiply bf16.
    BY: tl.constexpr = tl.bfloat16 if IS_SHORT and tl.bfloat16 == DTYPE and not INTERPRETED else tl.float32
    if scale is not None:
        factor = factor.to(BY)
    return _e2m1s(words, factor, CODES, BY)


@triton.jit
def _woven(a, b, c, d, e, f, g, h):
    """Eight tensors `[..., n]` -> `[..., n, 2, 2, 2]`, in order."""
    return tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))


@triton.jit
def scale_values(raw):
    """Scales in fp32; bytes are exponents (e8m0)."""
    if raw.dtype == tl.uint8:
        exponent = raw.to(tl.int32)
        # A fraction bit makes 2**-127 of exponent 0 and NaN of 255; without it they would be zero and infinity.
        fraction = tl.where(((exponent + 1) & 254) == 0, 0x00400000, 0)
        return (exponent << 23 | fraction).to(tl.float32, bitcast=True)
    return wide(raw)


@triton.jit
def _floats(codes):
    """Stored values that are not packed, in fp32; to convert an integer takes as long as eight sums."""
    if tl.int8 == codes.dtype:
        # The number with these bits is 1.5 * 2**23, near which fp32 has the integers and nothing between them.
        return (codes.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    return wide(codes)


@triton.jit
def load_groups(values, k, num_inputs, stride, GROUP: tl.constexpr, BK: tl.constexpr):
    """Scales or zero points of a tile, `[rows, groups]` of columns from `k`; `GROUP` columns share one (0: all)."""
    # A tile holds whole groups of columns or lies within one.
    SPAN: tl.constexpr = GROUP if GROUP > 0 and GROUP < BK else BK
    starts = k + SPAN * tl.arange(0, BK // SPAN)
    groups = (starts // GROUP if GROUP > 0 else starts * 0)[None, :]
    return tl.load(values[:, None] + groups * stride, mask=(starts < num_inputs)[None, :])


@triton.jit
def load_weight_only(
    rows,
    scale,
    zero,
    k,
    num_inputs,
    stride_k,
    PACKING: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """A dequantized tile `[rows, BK]` in `DTYPE`, columns from `k`.

    `rows` point to the beginning of each row; `scale` and `zero` are those of the tile (`load_groups`) or None.
    """
    columns = k + tl.arange(0, BK)
    CODES: tl.constexpr = 1 if PACKING == "plain" else (8 if rows.dtype.element_ty == tl.int32 else 2)
    words = k // CODES + tl.arange(0, BK // CODES)
    raw = load_tile(rows[:, None] + words[None, :] * stride_k, words, num_inputs // CODES, EVEN_K)
    factor = 1.0
    GROUPS: tl.constexpr = 1 if scale is None else scale.shape[1]
    raw = tl.reshape(raw, (raw.shape[0], GROUPS, raw.shape[1] // GROUPS))
    if scale is not None:
        factor = scale_values(scale)[:, :, None]
    offset = 0.0
    if zero is not None:
        offset = zero.to(tl.float32)[:, :, None]
    if PACKING == "int4":
        values = _int4s(raw.to(tl.int32), offset + 8.0, factor, CODES)
    elif PACKING == "e2m1":
        values = _scaled_e2m1s(raw.to(tl.int32), scale, factor, CODES, DTYPE)
    else:
        values = (_floats(raw) - offset) * factor
    values = tl.reshape(values, (values.shape[0], BK))
    if not EVEN_K:
        values = tl.where(columns[None, :] < num_inputs, values, 0.0)
    return as_operand(narrow(values, DTYPE))
