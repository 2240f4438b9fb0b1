"""One linear map per expert over grouped rows, on any device and under compilation."""

from __future__ import annotations

import attrs
import torch
from torch.nn import functional

from moe_core.kernels.blocks import experts_of_blocks, linear_by_block
from moe_core.kernels.expert_weights import ExpertLinear
from moe_core.kernels.linear import HAS_FAST_GEMM, Group, active_groups, linear_by_expert
from moe_core.kernels.linear_op import grouped_linear_op
from moe_core.payloads import Tensor

#: Most rows of any expert for which one grouped GEMM on CPU is not slower than the loop: of AMX, where both multiply
#: bf16, and of AVX2, where the loop multiplies more rows in fp32.
_GROUPED_GEMM_ROWS = 64 if HAS_FAST_GEMM[torch.bfloat16] else 6
#: Bytes that are read or written in the time that a product of several rows takes before it begins, in the grouped GEMM
#: as in the loop: 25 us with AMX. A batch of products begins once.
_BYTES_TO_BEGIN = 256 << 10
#: How many such beginnings the steps around a batch take.
_STEPS_OF_BATCH = 3
#: Rows that are multiplied in the time in which their weight is read.
_ROWS_PER_WEIGHT = 64


@attrs.define(eq=False)
class Groups:
    """Where each expert's rows are.

    Attributes:
        num_tokens_per_expert: `[L]` int32, real rows.
        group_ends: `[L]` int32, row after each padded group.
        on_host: The experts with rows as host numbers, None where reading them would wait for a device or break
            a graph.
        block_experts: `[B]` int64, the expert of each block of rows, if the rows lie in blocks; else None.
        places: int64, where the real rows lie in a batch, in which all experts have as many; None until one is made.
    """

    num_tokens_per_expert: Tensor
    group_ends: Tensor
    on_host: list[Group] | None = None
    block_experts: Tensor | None = None
    places: Tensor | None = None


def make_groups(num_tokens_per_expert: Tensor, group_ends: Tensor) -> Groups:
    """The groups of rows with these counts and ends, both `[L]` int32; on the host too where that is free."""
    free = group_ends.device.type == "cpu" and not torch.compiler.is_compiling()
    on_host = active_groups(num_tokens_per_expert, group_ends) if free else None
    return Groups(num_tokens_per_expert, group_ends, on_host)


def make_blocks(num_tokens_per_expert: Tensor, group_ends: Tensor, num_rows: int, block: int) -> Groups:
    """The groups of `num_rows` rows of which each `block` have one expert.

    Args:
        num_tokens_per_expert: `[L]` int32.
        group_ends: `[L]` int32, multiples of `block`.
        num_rows: All rows, those past the last group too: a multiple of `block`.
        block: Rows of a block.
    """
    experts = experts_of_blocks(group_ends, num_rows, block)
    return Groups(num_tokens_per_expert, group_ends, block_experts=experts)


def grouped_linear(rows: Tensor, groups: Groups, linear: ExpertLinear, deterministic: bool = False) -> Tensor:
    """`rows [R, C] -> [R, N]`, each group by its expert's weight and bias.

    On CPU: a loop over the experts that have rows (one opaque operator under compilation); for unquantized bf16 with
    few rows per expert the grouped GEMM of torch, and with small weights one batch. On accelerators: that grouped GEMM
    where it does not wait for the host; else blocks of rows.

    Args:
        rows: `[R, C]`; rows outside the groups' real rows are undefined and their results too.
        groups: Where the rows of each expert are.
        linear: The weights; its rounder is applied to the rows first.
        deterministic: As in `linear.linear_by_expert`; on CPU only.

    Returns:
        fp32 from loop and blocks, bf16 from the grouped GEMM and the batch.
    """
    is_real = _real_rows(groups, rows.shape[0]) if linear.rounder.needs_real_rows else None
    input_scale = None if linear.input_scale is None else _by_row(linear.input_scale, groups, rows.shape[0])
    rows, row_scale = linear.rounder(rows, input_scale, is_real)
    if linear.fits_grouped_gemm and not deterministic:
        products = _in_one_call(rows, groups, linear)
        if products is not None:
            return products
    if groups.on_host is not None:
        return linear_by_expert(rows, row_scale, groups.on_host, linear, deterministic)
    if groups.block_experts is not None and not torch.compiler.is_compiling():
        return linear_by_block(rows, row_scale, groups.block_experts, linear)
    out: Tensor = grouped_linear_op(
        rows,
        row_scale,
        groups.num_tokens_per_expert,
        groups.group_ends,
        groups.block_experts,
        linear.weight,
        linear.weight_dtype,
        list(linear.tile),
        linear.scale,
        linear.zero_point,
        linear.output_scale,
        linear.bias,
        deterministic,
    )
    return out


def _experts_of_rows(group_ends: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The rows' numbers and the expert of each, int `[R]`: L past the last group, and where there is no expert."""
    row = torch.arange(num_rows, device=group_ends.device, dtype=group_ends.dtype)
    return row, torch.searchsorted(group_ends, row, right=True)


def _by_row(by_expert: Tensor, groups: Groups, num_rows: int) -> Tensor:
    """`[L]` -> `[R, 1]`; rows of no expert get a one."""
    _, expert = _experts_of_rows(groups.group_ends, num_rows)
    return functional.pad(by_expert, (0, 1), value=1.0)[expert][:, None]


def _real_rows(groups: Groups, num_rows: int) -> Tensor:
    """Which rows belong to a token, bool `[R]`; of the others not even the size may be looked at."""
    row, expert = _experts_of_rows(groups.group_ends, num_rows)
    # Past the last group, and for no expert at all, the appended entries: no real row.
    starts = functional.pad(groups.group_ends, (1, 0))
    counts = functional.pad(groups.num_tokens_per_expert, (0, 1))
    return row - starts[expert] < counts[expert]


def _in_one_call(rows: Tensor, groups: Groups, linear: ExpertLinear) -> Tensor | None:
    """As `grouped_linear`, for bf16; None on CPU where the loop is faster, or groups are not known on the host."""
    if rows.device.type != "cpu":
        return _grouped_gemm(rows, groups.group_ends, linear)
    if not groups.on_host or not _lies_in_order(linear.weight):
        return None
    sizes = [end - start for _, start, end in groups.on_host]
    if _pays_as_batch(sizes, linear.weight):
        return _batched_gemm(rows, groups, sizes, linear)
    return _grouped_gemm(rows, groups.group_ends, linear) if max(sizes) <= _GROUPED_GEMM_ROWS else None


def _lies_in_order(weight: Tensor) -> bool:
    """Whether rows of the weight are in order and on 16 bytes: on CPU not all kernels take mapped files and views."""
    return (
        weight.stride(2) == 1
        and weight.stride(0) % 8 == 0
        and weight.stride(1) % 8 == 0
        and weight.data_ptr() % 16 == 0
    )


def _pays_as_batch(sizes: list[int], weight: Tensor) -> bool:
    """Whether one batch spares more than it takes for experts without rows, filling up the others, and copies.

    Args:
        sizes: Rows of the experts that have any; there are some.
        weight: `[L, N, C]`.
    """
    if not HAS_FAST_GEMM[weight.dtype]:
        return False
    num_experts, num_outputs, num_inputs = weight.shape
    num_rows, num_real = num_experts * max(sizes), sum(sizes)
    idle_weights = num_experts - len(sizes) + (num_rows - num_real) / _ROWS_PER_WEIGHT
    copied = num_rows * (num_inputs + num_outputs) + num_real * num_outputs
    taken = (idle_weights * num_outputs * num_inputs + copied) * weight.itemsize
    # A product of one row begins at once.
    return taken <= (sum(size > 1 for size in sizes) - _STEPS_OF_BATCH) * _BYTES_TO_BEGIN


def _batched_gemm(rows: Tensor, groups: Groups, sizes: list[int], linear: ExpertLinear) -> Tensor:
    """As `grouped_linear`: rows, which lie back to back, go to blocks of as many rows for each expert, and back."""
    weight, num_real = linear.weight, sum(sizes)
    num_experts, num_outputs, num_inputs = weight.shape
    places = groups.places
    if places is None:
        is_real = torch.arange(max(sizes), device=rows.device) < groups.num_tokens_per_expert[:, None]
        places = groups.places = is_real.flatten().nonzero()[:, 0]
    blocks = rows.new_empty((num_experts, max(sizes), num_inputs), dtype=weight.dtype)
    blocks.view(-1, num_inputs).index_copy_(0, places, rows[:num_real].to(weight.dtype))
    products = torch.bmm(blocks, weight.mT)
    if linear.bias is not None:
        products += linear.bias[:, None]
    out = products.new_empty((rows.shape[0], num_outputs))
    torch.index_select(products.view(-1, num_outputs), 0, places, out=out[:num_real])
    return out


def _grouped_gemm(rows: Tensor, group_ends: Tensor, linear: ExpertLinear) -> Tensor:
    out = functional.grouped_mm(rows.to(linear.weight.dtype), linear.weight.mT, offs=group_ends)
    if linear.bias is None:
        return out
    _, expert = _experts_of_rows(group_ends, rows.shape[0])
    return out + linear.bias[expert.clamp(max=group_ends.shape[0] - 1)]
