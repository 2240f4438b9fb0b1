"""One linear map per expert over blocks of rows whose expert only the device knows: nothing waits for the host.

The rows of a block belong to one expert. How many rows a block has and how many blocks there are follow from static
sizes; which expert a block belongs to is a table on the device, and weights are fetched by it.
"""

from __future__ import annotations

import torch

from moe_core.kernels.expert_weights import StoredLinear
from moe_core.kernels.number_formats import power_of_two_scale
from moe_core.payloads import Tensor

#: Bytes of the weights, as they are multiplied, that are fetched at a time; those of one block at least. A product of
#: few blocks does not fill a large GPU: with a quarter of this a layer takes up to 1.65 times as long (on an H100).
#: Codes and what reading them takes included, a forward holds at most 1.75 times this, however many tokens and experts.
_STEP_BYTES = 256 << 20
#: The largest number of a row that becomes fp16 is brought to the octave below this: fp16 ends at 65504, and what is
#: far smaller than the largest stays above its subnormal numbers. Sums of such products are far from the end of fp32.
_FP16_LARGEST = 2.0**15


def rows_per_block(num_rows: int, num_experts: int) -> int:
    """The least power of two that is not below the mean number of rows per expert.

    `permute.max_rows` with this alignment is below three times the rows, in at most twice as many blocks as experts.
    """
    rows = 1
    # Comparisons alone, so that a compiler need not fix the number of rows.
    while 0 < rows * num_experts < num_rows:
        rows *= 2
    return rows


def experts_of_blocks(group_ends: Tensor, num_rows: int, block: int) -> Tensor:
    """Expert of each block of `block` rows, int64 `[B]`; for blocks past the last group the last expert.

    Args:
        group_ends: `[L]` int32, multiples of `block`; there is an expert.
        num_rows: A multiple of `block`.
        block: Rows of a block.
    """
    first = torch.arange(0, num_rows, block, device=group_ends.device, dtype=group_ends.dtype)
    return torch.searchsorted(group_ends, first, right=True).clamp(max=group_ends.shape[0] - 1)


def linear_by_block(rows: Tensor, row_scale: Tensor | None, experts: Tensor, linear: StoredLinear) -> Tensor:
    """Multiply each block by its expert's weight, scale the results and add the bias.

    Args:
        rows: `[R, C]` float rows in blocks of `R / B`, already rounded to the scheme's activation dtype.
        row_scale: What multiplies the results for them: `[R, 1]`, a scalar, or None.
        experts: `[B]` int64, the expert of each block.
        linear: The weights.

    Returns:
        `[R, N]` fp32; a row depends on its block's expert and on nothing else but itself.
    """
    num_rows, num_blocks, width = rows.shape[0], experts.shape[0], linear.num_outputs
    out = rows.new_empty((num_rows, width), dtype=torch.float32)
    if num_rows == 0:
        return out
    dtype = _operand_dtype(linear)
    rows, power = _in_range(rows, dtype)
    blocks, by_block = rows.view(num_blocks, -1, rows.shape[1]), out.view(num_blocks, -1, width)
    step = max(1, _STEP_BYTES // max(1, dtype.itemsize * width * linear.num_inputs))
    for first in range(0, num_blocks, step):
        part = slice(first, first + step)
        # Weights without a name are gone before those of the next step are fetched.
        _multiply(by_block[part], blocks[part].to(dtype), linear.fetch(experts[part]).to(dtype))
    if linear.output_scale is not None:
        by_block.mul_(linear.output_scale.index_select(0, experts)[:, None])
    for scale in (power, row_scale):
        if scale is not None:
            out.mul_(scale)
    if linear.bias is not None:
        by_block.add_(linear.bias.index_select(0, experts)[:, None])
    return out


def _operand_dtype(linear: StoredLinear) -> torch.dtype:
    """fp32 for what was dequantized, and for fp16 where a product cannot have a wider dtype than its operands."""
    narrow = linear.weight.dtype == torch.float16 and not _writes_fp32(linear.weight.device)
    return torch.float32 if linear.is_quantized or narrow else linear.weight.dtype


def _writes_fp32(device: torch.device) -> bool:
    """Whether `bmm` of half precision takes `out_dtype`."""
    return device.type == "cuda" and torch.version.hip is None


def _in_range(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Rows that fp16 holds well, each divided by a power of two, and these `[R, 1]`; None where all are as before."""
    if dtype != torch.float16 or rows.dtype == torch.float16:
        return rows, None
    power = power_of_two_scale(rows, _FP16_LARGEST)
    return rows / power, power


def _multiply(out: Tensor, rows: Tensor, weight: Tensor) -> None:
    """`out [B, M, N] = rows [B, M, C] @ weight [B, N, C].T`, added up and written in fp32."""
    if weight.dtype == torch.float32:
        torch.bmm(rows, weight.mT, out=out)
    elif not _writes_fp32(weight.device):
        out.copy_(torch.bmm(rows, weight.mT))
    elif torch.compiler.is_compiling():
        # Products of this kind into `out` are compiled by torch 2.13, and not by 2.11.
        out.copy_(torch.bmm(rows, weight.mT, out_dtype=torch.float32))
    else:
        torch.bmm(rows, weight.mT, out_dtype=torch.float32, out=out)
