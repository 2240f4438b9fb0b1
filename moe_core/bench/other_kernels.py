"""Kernel packages of others, called as their documentation says."""

from __future__ import annotations

from collections.abc import Mapping

from moe_core.bench.grouped_mm import fused, swiglu
from moe_core.payloads import Tensor
from moe_core.request import LayerRequest
from moe_core.tuning.layers import LayerCall


def bind_liger(request: LayerRequest, weights: Mapping[str, Tensor]) -> LayerCall:
    """The fused layer of liger-kernel; ids are int32."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    w13, w2 = weights["w13"], weights["w2"]
    return lambda hidden_states, topk_ids, topk_weights: LigerFusedMoEFunction.apply(
        hidden_states, w13, w2, topk_ids, topk_weights
    )


def bind_moe_ops(request: LayerRequest, weights: Mapping[str, Tensor]) -> LayerCall:
    """The parts of moe-ops, which has no activation: that is one fused kernel of torch's compiler; ids are int32."""
    from moe_ops import grouped_gemm, permute, unpermute

    w13, w2 = weights["w13"], weights["w2"]
    activate = fused(swiglu, w13.device.type)

    def layer(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        rows, row_map, ends = permute(hidden_states, topk_ids, E=request.num_experts)
        rows = activate(grouped_gemm(rows, w13, ends, trans_b=True))
        rows = grouped_gemm(rows, w2, ends, trans_b=True)
        output: Tensor = unpermute(rows, row_map, topk_weights, *topk_ids.shape)
        return output

    return layer
