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


@attrs.define(eq=False)
class Groups:
    """Where each expert's rows are.

    Attributes:
        num_tokens_per_expert: `[L]` int32, real rows.
        group_ends: `[L]` int32, row after each padded group.
        on_host: The experts with rows as host numbers, None where reading them would wait for a device or break
            a graph.
        block_experts: `[B]` int64, the expert of each block of rows, if the rows lie in blocks; else None.
    """

    num_tokens_per_expert: Tensor
    group_ends: Tensor
    on_host: list[Group] | None = None
    block_experts: Tensor | None = None


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

    On CPU: a loop over the experts that have rows (one opaque operator under compilation), for unquantized bf16 with
    few rows per expert the grouped GEMM of torch. On accelerators: that grouped GEMM where it does not wait for the
    host; else blocks of rows.

    Args:
        rows: `[R, C]`; rows outside the groups' real rows are undefined and their results too.
        groups: Where the rows of each expert are.
        linear: The weights; its rounder is applied to the rows first.
        deterministic: As in `linear.linear_by_expert`; on CPU only.

    Returns:
        fp32 from loop and blocks, bf16 from the grouped GEMM.
    """
    is_real = _real_rows(groups, rows.shape[0]) if linear.rounder.needs_real_rows else None
    input_scale = None if linear.input_scale is None else _by_row(linear.input_scale, groups, rows.shape[0])
    rows, row_scale = linear.rounder(rows, input_scale, is_real)
    on_accelerator = rows.device.type != "cpu"
    if linear.fits_grouped_gemm and (on_accelerator or (_few_rows(groups, linear) and not deterministic)):
        return _grouped_gemm(rows, groups.group_ends, linear)
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


def _few_rows(groups: Groups, linear: ExpertLinear) -> bool:
    """Whether the loop on CPU would multiply (nearly) every group as stored; then one call saves its steps."""
    if not groups.on_host:
        return False
    weight = linear.weight
    # On CPU the kernel needs rows of the weight in order and on 16 bytes, which mapped files and views do not promise.
    aligned = weight.data_ptr() % 16 == 0 and weight.stride(0) % 8 == 0 and weight.stride(1) % 8 == 0
    if weight.stride(2) != 1 or not aligned:
        return False
    largest = max(end - start for _, start, end in groups.on_host)
    return largest <= _GROUPED_GEMM_ROWS


def _grouped_gemm(rows: Tensor, group_ends: Tensor, linear: ExpertLinear) -> Tensor:
    out = functional.grouped_mm(rows.to(linear.weight.dtype), linear.weight.mT, offs=group_ends)
    if linear.bias is None:
        return out
    _, expert = _experts_of_rows(group_ends, rows.shape[0])
    return out + linear.bias[expert.clamp(max=group_ends.shape[0] - 1)]
