"""One linear map per expert over rows grouped by expert on a CPU: the loop over experts that have rows.

CPUs without bf16 or fp16 instructions multiply half precision at a fraction of the fp32 rate, and widening a weight
costs as much as the product of one row. So up to three rows are multiplied as stored, and more rows by fp32 copies of
the weight, made block by block in a scratch that stays in the cache. Quantized weights are read through the same
blocks, so that never more than one block of dequantized weights is alive. Other devices multiply as in `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from moe_core.kernels.expert_weights import StoredLinear
from moe_core.kernels.number_formats import power_of_two_scale
from moe_core.payloads import Tensor

#: fp32 bytes that a thread gets of one block of weight rows: small enough for the cache, large enough to amortize the
#: calls and the threads' waiting for each other after each of them.
_BLOCK_BYTES = 3 << 20
#: Most rows for which a half precision GEMM as stored is faster than fp32 blocks (measured on AVX2).
_FEW_ROWS = 3
#: Most rows for which a block is multiplied in one part per thread (measured with two threads).
_SPLIT_ROWS = 128
#: fp32 numbers per cache line. Rows of whole lines have the same alignment, which the deterministic loop relies on.
_LINE = 16

#: Half precision dtypes for which this CPU's GEMM is fast at any size.
HAS_FAST_GEMM = {
    torch.bfloat16: torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}

#: An expert with rows, its first row, and the row after its last real one.
Group = tuple[int, int, int]


def active_groups(num_tokens_per_expert: Tensor, group_ends: Tensor) -> list[Group]:
    """The experts with rows; reads both `[L]` tensors on the host."""
    start, groups = 0, []
    for expert, (count, end) in enumerate(zip(num_tokens_per_expert.tolist(), group_ends.tolist(), strict=True)):
        if count:
            groups.append((expert, start, start + count))
        start = end
    return groups


def linear_by_expert(
    rows: Tensor,
    row_scale: Tensor | None,
    groups: list[Group],
    linear: StoredLinear,
    deterministic: bool = False,
) -> Tensor:
    """Multiply each group's rows by its expert's weight, scale the results and add the bias.

    Args:
        rows: `[R, C]` float rows, already rounded to the scheme's activation dtype.
        row_scale: What multiplies the results for them: `[R, 1]`, a scalar, or None.
        groups: The experts to visit; other experts' weights are not read.
        linear: The weights.
        deterministic: Each row's result depends on that row and its weight alone, bit by bit.

    Returns:
        `[R, N]` fp32; rows outside `groups` are undefined.
    """
    out = rows.new_empty((rows.shape[0], linear.num_outputs), dtype=torch.float32)
    multiply = _multiply_by_row if deterministic else _multiply
    scratch = _Scratch(linear)
    for expert, start, end in groups:
        target = out[start:end]
        multiply(target, rows[start:end], linear, expert, scratch)
        if linear.output_scale is not None:
            target.mul_(linear.output_scale[expert])
        if row_scale is not None:
            target.mul_(row_scale[start:end] if row_scale.dim() else row_scale)
        if linear.bias is not None:
            target.add_(linear.bias[expert])
    return out


class _Scratch:
    """Memory for one block of fp32 weight rows, made when first needed and used for every block of the call."""

    def __init__(self, linear: StoredLinear) -> None:
        self.num_inputs = linear.num_inputs
        num_outputs = max(1, linear.num_outputs)
        self.block_rows = min(self._rows_in_cache(num_outputs), num_outputs)
        self._linear = linear
        self._memory: Tensor | None = None

    def _rows_in_cache(self, num_outputs: int) -> int:
        """Rows per block: at most half of a larger weight, in whole lines per thread, and as equal as that allows.

        Threads that divide a block otherwise than the one before write into each other's part of the cache.
        """
        threads = torch.get_num_threads()
        by_one_thread = max(1, _BLOCK_BYTES // (4 * max(1, self.num_inputs) * _LINE)) * _LINE
        most = max(by_one_thread, min(by_one_thread * threads, -(-num_outputs // 2)))
        num_blocks, unit = -(-num_outputs // most), _LINE * threads
        return -(-num_outputs // (num_blocks * unit)) * unit

    def blocks(self, expert: int, padded: bool) -> Iterator[tuple[int, Tensor]]:
        """First row and fp32 `[rows, C]` of each block; `padded` gives whole cache lines, zero past C."""
        memory = self._memory
        if memory is None:
            memory = self._memory = self._allocate(padded)
        reader = self._linear.reader(expert)
        for first in range(0, self._linear.num_outputs, self.block_rows):
            block = memory[: min(self.block_rows, self._linear.num_outputs - first)]
            reader.read(block[:, : self.num_inputs], first)
            yield first, block

    def _allocate(self, padded: bool) -> Tensor:
        weight = self._linear.weight
        if padded:
            return weight.new_zeros((self.block_rows, -(-self.num_inputs // _LINE) * _LINE), dtype=torch.float32)
        if weight.stride(1) == 1 and weight.stride(2) != 1:
            # A transposed weight is copied along its own memory order.
            return weight.new_empty((self.num_inputs, self.block_rows), dtype=torch.float32).mT
        return weight.new_empty((self.block_rows, self.num_inputs), dtype=torch.float32)


def _multiply(out: Tensor, rows: Tensor, linear: StoredLinear, expert: int, scratch: _Scratch) -> None:
    weight = linear.weight[expert]
    if weight.dtype == torch.float32:
        torch.mm(rows.float(), weight.t(), out=out)
        return
    if not linear.is_quantized and _multiplies_as_stored(rows.shape[0], weight):
        if weight.dtype == torch.bfloat16:
            out.copy_(functional.linear(rows.to(weight.dtype), weight))
            return
        # Small rows, and their products, would be fp16's subnormal numbers. Large ones are not made smaller.
        power = power_of_two_scale(rows, 1.0).clamp_(max=1.0)
        out.copy_(functional.linear((rows / power).to(weight.dtype), weight)).mul_(power)
        # fp16 ends at 65504; the fp32 blocks below do not.
        if bool(out.isfinite().all()):
            return
    wide = rows.float()
    for first, block in scratch.blocks(expert, padded=False):
        _multiply_block(out[:, first : first + block.shape[0]], wide, block)


def _multiply_block(out: Tensor, rows: Tensor, block: Tensor) -> None:
    """`out = rows @ block.T`, split so that a thread multiplies the part of the block that it has just written.

    A GEMM that divides the block otherwise moves most of it from core to core, which for few rows costs more than
    the product.
    """
    threads = torch.get_num_threads()
    if threads == 1 or rows.shape[0] > _SPLIT_ROWS or block.shape[0] % threads:
        torch.mm(rows, block.t(), out=out)
        return
    parts = block.view(threads, -1, block.shape[1]).mT
    by_thread = rows.expand(threads, -1, -1)
    if rows.shape[0] == 1:
        torch.bmm(by_thread, parts, out=out.view(threads, 1, -1))
    else:
        out.view(rows.shape[0], threads, -1).copy_(torch.bmm(by_thread, parts).transpose(0, 1))


def _multiplies_as_stored(num_rows: int, weight: Tensor) -> bool:
    return HAS_FAST_GEMM.get(weight.dtype, False) or (num_rows <= _FEW_ROWS and weight.stride(1) == 1)


def _multiply_by_row(out: Tensor, rows: Tensor, linear: StoredLinear, expert: int, scratch: _Scratch) -> None:
    """Every row alone by the same blocks: a GEMM may sum in another order for another height or place in it."""
    width = -(-scratch.num_inputs // _LINE) * _LINE
    padded = rows.new_zeros((rows.shape[0], width), dtype=torch.float32)
    padded[:, : scratch.num_inputs] = rows
    for first, block in scratch.blocks(expert, padded=True):
        for index in range(rows.shape[0]):
            out[index, first : first + block.shape[0]] = torch.mv(block, padded[index])
