"""What runs in every forward. Letters: `R` rows grouped by expert, `L` experts, `H` hidden, `I` intermediate size."""

from __future__ import annotations

import torch

from moe_core.payloads import ContiguousTokens, ExpertsFn, PreparedWeights
from moe_plugin_toy_accelerator.accelerator import grouped_gemm


def bind(weights: PreparedWeights) -> ExpertsFn:
    """The experts over prepared weights: a function without any choice left in it."""
    w13, w2 = weights["w13"], weights["w2"]

    def experts(tokens: ContiguousTokens) -> torch.Tensor:
        """`[R, H]` -> unweighted `[R, H]`: combine applies the router weights. Undefined rows may hold anything."""
        counts, ends = tokens.num_tokens_per_expert, tokens.group_ends
        hidden = grouped_gemm(tokens.hidden_states, w13, counts, ends)
        gate, up = hidden.float().chunk(2, dim=-1)
        activated = (torch.nn.functional.silu(gate) * up).to(hidden.dtype)
        return grouped_gemm(activated, w2, counts, ends)

    return experts
