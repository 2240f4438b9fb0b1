"""The products of all groups as one opaque operator, so that full-graph compilation keeps the loops.

On a CPU the operator reads the groups' sizes when it runs; on other devices it takes blocks, whose experts it need not
know.
"""

from __future__ import annotations

import torch

from moe_core.kernels.blocks import linear_by_block
from moe_core.kernels.expert_weights import StoredLinear
from moe_core.kernels.linear import active_groups, linear_by_expert
from moe_core.payloads import Tensor


@torch.library.custom_op("moe_core::grouped_linear", mutates_args=())
def grouped_linear_op(
    rows: Tensor,
    row_scale: Tensor | None,
    num_tokens_per_expert: Tensor,
    group_ends: Tensor,
    block_experts: Tensor | None,
    weight: Tensor,
    weight_dtype: str,
    tile: list[int],
    scale: Tensor | None,
    zero_point: Tensor | None,
    output_scale: Tensor | None,
    bias: Tensor | None,
    deterministic: bool,
) -> Tensor:
    """`blocks.linear_by_block` where there are blocks, else `linear.linear_by_expert`: `rows [R, C]` -> fp32 `[R, N]`.

    An operator takes no objects, so that a `StoredLinear` and `Groups` come in their parts.
    """
    linear = StoredLinear(
        weight=weight,
        weight_dtype=weight_dtype,
        tile=(tile[0], tile[1]),
        scale=scale,
        zero_point=zero_point,
        output_scale=output_scale,
        bias=bias,
    )
    if block_experts is not None:
        return linear_by_block(rows, row_scale, block_experts, linear)
    return linear_by_expert(rows, row_scale, active_groups(num_tokens_per_expert, group_ends), linear, deterministic)


@grouped_linear_op.register_fake
def _fake(
    rows: Tensor,
    row_scale: Tensor | None,
    counts: Tensor,
    ends: Tensor,
    experts: Tensor | None,
    weight: Tensor,
    *_: object,
) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]), dtype=torch.float32)
