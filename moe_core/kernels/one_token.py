"""One token on CPU: a GEMM per expert, without the permutation that many tokens need."""

from __future__ import annotations

import torch
from torch.nn import functional

from moe_core.kernels.expert_weights import ExpertLinear, Experts
from moe_core.payloads import Tensor


def takes_one_token(hidden_states: Tensor, experts: Experts) -> bool:
    """Whether `experts_of_one_token` serves a call with these `hidden_states [T, H]`.

    fp16 is left out because a product as stored may exceed its largest number; quantized weights because they are
    read block by block; deterministic experts because a row in a batch takes another way.
    """
    return (
        hidden_states.shape[0] == 1
        and hidden_states.device.type == "cpu"
        and hidden_states.dtype != torch.float16
        and not torch.compiler.is_compiling()
        and not experts.deterministic
        and experts.w13.is_plain
        and experts.w2.is_plain
    )


def experts_of_one_token(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts) -> Tensor:
    """`[1, H]` -> the weighted sum `[1, H]` of its experts, added up in fp32.

    Args:
        hidden_states: `[1, H]` in the layer's dtype.
        topk_ids: `[1, K]` local ids, -1 = no expert.
        topk_weights: `[1, K]`, used as fp32.
        experts: The local experts; `takes_one_token` holds.
    """
    slots = [(slot, expert) for slot, expert in enumerate(topk_ids[0].tolist()) if expert >= 0]
    if not slots:
        return torch.zeros_like(hidden_states)
    chosen = [expert for _, expert in slots]
    weights = topk_weights[0].float()
    if len(slots) < topk_ids.shape[1]:
        weights = weights[[slot for slot, _ in slots]]
    rows = [hidden_states] * len(slots)
    if experts.weight_on_input:
        rows = list(torch.split((hidden_states * weights[:, None]).to(hidden_states.dtype), 1))
    hidden = experts.activation(_linear(rows, experts.w13, chosen))
    out = _linear(list(torch.split(hidden, 1)), experts.w2, chosen)
    if experts.post_norm is not None:
        out = experts.post_norm(out)
    out = out.float()
    total = out.sum(0, keepdim=True) if experts.weight_on_input else weights[None] @ out
    return total.to(hidden_states.dtype)


def _linear(rows: list[Tensor], linear: ExpertLinear, chosen: list[int]) -> Tensor:
    """One row per expert; only the GEMMs are per expert, since at this size every further operation counts."""
    weight = linear.weight
    pairs = zip(rows, chosen, strict=True)
    out = torch.cat([functional.linear(row.to(weight.dtype), weight[expert]) for row, expert in pairs])
    return out if linear.bias is None else out + linear.bias[chosen]
