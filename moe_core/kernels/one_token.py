"""One token on CPU: its experts one after the other, without the permutation that many tokens need."""

from __future__ import annotations

import torch
from torch.nn import functional

from moe_core.kernels.linear import ExpertLinear
from moe_core.payloads import ActivationFn, PostNormFn, Tensor


def takes_one_token(hidden_states: Tensor, w13: ExpertLinear, w2: ExpertLinear) -> bool:
    """Whether `experts_of_one_token` serves this call.

    fp16 is left out because a product as stored may exceed its largest number; quantized weights because they are
    read block by block.
    """
    return (
        hidden_states.shape[0] == 1
        and hidden_states.device.type == "cpu"
        and hidden_states.dtype != torch.float16
        and not torch.compiler.is_compiling()
        and not (w13.scheme.is_quantized or w2.scheme.is_quantized)
    )


def experts_of_one_token(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: ExpertLinear,
    w2: ExpertLinear,
    activation: ActivationFn,
    post_norm: PostNormFn | None,
    weight_on_input: bool,
) -> Tensor:
    """`[1, H]` -> the weighted sum `[1, H]` of its experts, added up in fp32 in slot order.

    Args:
        hidden_states: `[1, H]` in the layer's dtype.
        topk_ids: `[1, K]` local ids, -1 = no expert.
        topk_weights: `[1, K]`, used as fp32.
        w13: First projection.
        w2: Second projection.
        activation: Between the projections.
        post_norm: After the second projection, or None.
        weight_on_input: As in `experts.Experts`.
    """
    total = hidden_states.new_zeros((1, w2.num_outputs), dtype=torch.float32)
    for expert, weight in zip(topk_ids[0].tolist(), topk_weights[0].float().tolist(), strict=True):
        if expert < 0:
            continue
        row = (hidden_states * weight).to(hidden_states.dtype) if weight_on_input else hidden_states
        out = _linear(activation(_linear(row, w13, expert)), w2, expert)
        if post_norm is not None:
            out = post_norm(out)
        total.add_(out, alpha=1.0 if weight_on_input else weight)
    return total.to(hidden_states.dtype)


def _linear(row: Tensor, linear: ExpertLinear, expert: int) -> Tensor:
    out = functional.linear(row.to(linear.weight.dtype), linear.weight[expert])
    return out if linear.bias is None else out + linear.bias[expert]
