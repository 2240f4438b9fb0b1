"""Runner `fuseep`: one call of Ascend's DeepEP for dispatch, both GEMMs and combine."""

from __future__ import annotations

import torch

from moe_core.kernel_library import require_keywords
from moe_core.payloads import ExpertGroup, FusedFn, PreparedWeights, Tensor
from moe_core.plan import MoEPlan, Route
from moe_plugin_ascend.deepep_buffers import BUFFERS, low_latency_geometry
from moe_plugin_ascend.deepep_specs import DEEP_EP
from moe_plugin_ascend.expert_ids import LibraryIds, at_least_one
from moe_plugin_ascend.fuseep_specs import FUSE_MODES
from moe_plugin_ascend.fuseep_weights import prepare

__all__ = ["bind", "prepare"]


def bind(plan: MoEPlan, route: Route, weights: PreparedWeights, group: ExpertGroup) -> FusedFn:
    """The fused call of one route.

    Raises:
        InputError: The group has no process group.
        PluginError: The installed library cannot be loaded or is too old.
    """
    mode, ids_of = FUSE_MODES[weights.layout], LibraryIds(plan.request, group.device)
    geometry = low_latency_geometry(plan, route, ids_of.num_experts)
    shared = BUFFERS.get(group.require_process_group(route.runner.full_name), geometry)
    require_keywords(
        shared.buffer.fused_deep_moe,
        "x",
        "topk_idx",
        "topk_weights",
        "gmm1_permuted_weight",
        "gmm1_permuted_weight_scale",
        "gmm2_weight",
        "gmm2_weight_scale",
        "num_max_dispatch_tokens_per_rank",
        "num_experts",
        "quant_mode",
        "fuse_mode",
        of=DEEP_EP,
    )
    # One argument, two meanings: tokens that a rank brings, or rows that it may receive.
    capacity = geometry.capacity * (1 if mode == 1 else plan.request.ep_size * plan.request.top_k)
    w13, w2 = weights["w13"], weights["w2"]
    # Mode 2 wants the scales of all experts in one row.
    scales = [weights[name] if mode == 1 else weights[name].view(-1) for name in ("w13_scale", "w2_scale")]

    @torch.no_grad()
    def fused(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        ids, row_weights = ids_of(topk_ids, topk_weights)
        if mode == 2:
            # Its scale of an all-zero row divides by zero; experts without biases make zeros of zeros.
            ids = torch.where(hidden_states.any(1, keepdim=True), ids, -1)
        x, ids, row_weights = at_least_one(hidden_states, ids, row_weights)
        output, _ = shared.buffer.fused_deep_moe(
            x=x,
            topk_idx=ids,
            topk_weights=row_weights,
            gmm1_permuted_weight=w13,
            gmm1_permuted_weight_scale=scales[0],
            gmm2_weight=w2,
            gmm2_weight_scale=scales[1],
            num_max_dispatch_tokens_per_rank=capacity,
            num_experts=geometry.num_experts,
            quant_mode=1,
            fuse_mode=mode,
        )
        return output[: hidden_states.shape[0]]  # type: ignore[no-any-return]

    return fused
