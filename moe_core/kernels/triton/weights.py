"""Stored weights of one projection, and how a tile of them becomes an operand."""

from __future__ import annotations

import attrs
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_core.kernels.triton.interpreter import as_operand, narrow
from moe_core.kernels.triton.launch import is_aligned
from moe_core.payloads import Tensor


@attrs.define(eq=False, kw_only=True)
class GroupedWeight:
    """The weights of one projection of all local experts, as a grouped GEMM reads them.

    Attributes:
        data: `[L, N, C]` as stored, any strides (4-bit: uint8 `[L, N, C / 2]`, the first value in the low nibble).
        packing: `plain`, `int4` (two's complement) or `e2m1`.
        bias: `[L, N]` or None.
        scale: `[L, N / rows, C / columns]` as `block` says, None where no scale is needed inside a row.
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

    def takes_descriptors(self) -> bool:
        """Whether the bulk copy engine can read the weights."""
        return self.packing == "plain" and takes_descriptor(self.data)

    def descriptor(self, n: int, k: int, halves: int, interleaved: bool) -> TensorDescriptor:
        """The weights as `[L, N / halves, halves, C]` in tiles of `[1, n, halves, k]`, made once per tile."""
        key = (n, k, halves, interleaved)
        if key not in self._descriptors:
            experts, rows, columns = self.data.shape
            by_expert, by_row, _ = self.data.stride()
            width = rows // halves
            within = (halves * by_row, by_row) if interleaved else (by_row, width * by_row)
            self._descriptors[key] = TensorDescriptor(
                self.data, [experts, width, halves, columns], [by_expert, *within, 1], [1, n, halves, k]
            )
        return self._descriptors[key]

    @property
    def num_inputs(self) -> int:
        """Width `C` of the input rows."""
        return self.data.shape[2] * (1 if self.packing == "plain" else 2)


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
def _nibbles(packed):
    """`[rows, n]` bytes -> `[rows, 2n]` codes, low nibble first."""
    return tl.reshape(tl.join(packed & 0xF, packed >> 4), (packed.shape[0], 2 * packed.shape[1]))


@triton.jit
def _e2m1(codes):
    """Codes of four bits -> 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign of bit 3, without a conversion per value.

    Exponent and fraction bits are put where fp32 has its own; the biases differ by 126.
    """
    codes = codes.to(tl.int32)
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _int4(codes):
    """Two's complement of four bits -> fp32."""
    return ((codes ^ 8).to(tl.int32) - 8).to(tl.float32)


@triton.jit
def _scale_values(raw):
    """Scales in fp32; bytes are exponents (e8m0), the smallest of which fp32 writes without one."""
    if raw.dtype == tl.uint8:
        exponent = raw.to(tl.int32)
        return tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@triton.jit
def load_weight_only(
    rows,
    scales,
    zeros,
    k,
    num_inputs,
    stride_k,
    stride_sk,
    stride_zk,
    PACKING: tl.constexpr,
    GROUP: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """A dequantized tile `[rows, BK]` in `DTYPE`, columns from `k`.

    `rows`, `scales` and `zeros` point to the beginning of each row; the last two go by `GROUP` columns (0: all) and may
    be None.
    """
    columns = k + tl.arange(0, BK)
    if PACKING == "plain":
        raw = load_tile(rows[:, None] + columns[None, :] * stride_k, columns, num_inputs, EVEN_K)
        values = raw.to(tl.float32)
    else:
        half = k // 2 + tl.arange(0, BK // 2)
        codes = _nibbles(load_tile(rows[:, None] + half[None, :] * stride_k, half, num_inputs // 2, EVEN_K))
        values = _int4(codes) if PACKING == "int4" else _e2m1(codes)
    # A tile holds whole groups of columns or lies within one.
    SPAN: tl.constexpr = GROUP if GROUP > 0 and GROUP < BK else BK
    starts = k + SPAN * tl.arange(0, BK // SPAN)
    groups = (starts // GROUP if GROUP > 0 else starts * 0)[None, :]
    there = (starts < num_inputs)[None, :]
    values = tl.reshape(values, (values.shape[0], BK // SPAN, SPAN))
    if zeros is not None:
        values -= tl.load(zeros[:, None] + groups * stride_zk, mask=there).to(tl.float32)[:, :, None]
    if scales is not None:
        values *= _scale_values(tl.load(scales[:, None] + groups * stride_sk, mask=there))[:, :, None]
    values = tl.reshape(values, (values.shape[0], BK))
    if not EVEN_K:
        values = tl.where(columns[None, :] < num_inputs, values, 0.0)
    return as_operand(narrow(values, DTYPE))
