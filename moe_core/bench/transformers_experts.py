"""The experts implementations of transformers, on the weights of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_core.payloads import TORCH_DTYPES, Tensor
from moe_core.request import LayerRequest
from moe_core.tuning.layers import LayerCall


def binder(name: str) -> Callable[[LayerRequest, Mapping[str, Tensor]], LayerCall]:
    """What binds the implementation called `name`, through the class of a model that all of them serve."""

    def bind(request: LayerRequest, weights: Mapping[str, Tensor]) -> LayerCall:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            num_experts=request.num_experts,
            hidden_size=request.hidden_size,
            moe_intermediate_size=request.intermediate_size,
            experts_implementation=name,
        )
        with torch.device("meta"):
            module: Any = Qwen3MoeExperts(config)
        module.gate_up_proj = torch.nn.Parameter(weights["w13"], requires_grad=False)
        module.down_proj = torch.nn.Parameter(weights["w2"], requires_grad=False)
        return lambda hidden_states, topk_ids, topk_weights: module(hidden_states, topk_ids, topk_weights)

    return bind


def gathered_bytes(request: LayerRequest, num_tokens: int) -> int:
    """Bytes of the copies of both projections that `batched_mm` makes, one for each routed row."""
    values = 3 * request.hidden_size * request.intermediate_size
    return num_tokens * request.top_k * values * TORCH_DTYPES[request.dtype].itemsize
