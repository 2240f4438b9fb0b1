"""Runner `fuseep`: one call of Ascend's DeepEP for dispatch, both GEMMs and combine."""

from __future__ import annotations

from functools import partial

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


class FusedExperts:
    """Sends tokens to the ranks of their experts, computes there, and brings the weighted sums back."""

    def __init__(self, plan: MoEPlan, route: Route, weights: PreparedWeights, group: ExpertGroup) -> None:
        """Get the buffer, together with all ranks, and say to the library once what stays.

        Raises:
            InputError: The group has no process group, or the workload no bound on its tokens.
            PluginError: The installed library cannot be loaded or is too old.
        """
        self._mode, self._ids = FUSE_MODES[weights.layout], LibraryIds(plan.request, group.device)
        geometry = low_latency_geometry(plan, route, self._ids.num_experts)
        self._shared = BUFFERS.get(group.require_process_group(route.runner.full_name), geometry)
        w13_scale, w2_scale = weights["w13_scale"], weights["w2_scale"]
        if self._mode == 2:
            # It wants the scales of all experts in one row.
            w13_scale, w2_scale = w13_scale.view(-1), w2_scale.view(-1)
        # One argument, two meanings: tokens that a rank brings, or rows that it may receive.
        rows_of_token = 1 if self._mode == 1 else plan.request.ep_size * plan.request.top_k
        same = {
            "gmm1_permuted_weight": weights["w13"],
            "gmm1_permuted_weight_scale": w13_scale,
            "gmm2_weight": weights["w2"],
            "gmm2_weight_scale": w2_scale,
            "num_max_dispatch_tokens_per_rank": geometry.capacity * rows_of_token,
            "num_experts": geometry.num_experts,
            "quant_mode": 1,
            "fuse_mode": self._mode,
        }
        call = self._shared.buffer.fused_deep_moe
        call = require_keywords(call, "x", "topk_idx", "topk_weights", *same, of=DEEP_EP)
        self._call = partial(call, **same)

    @torch.no_grad()
    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """`[T, H]`, ids and weights `[T, K]` of this rank -> the weighted sums `[T, H]`."""
        ids, row_weights = self._ids(topk_ids, topk_weights)
        if self._mode == 2:
            # Its scale of an all-zero row divides by zero; experts without biases make zeros of zeros.
            ids = torch.where(hidden_states.any(1, keepdim=True), ids, -1)
        x, ids, row_weights = at_least_one(hidden_states, ids, row_weights)
        output, _ = self._call(x=x, topk_idx=ids, topk_weights=row_weights)
        return output[: hidden_states.shape[0]]  # type: ignore[no-any-return]


def bind(plan: MoEPlan, route: Route, weights: PreparedWeights, group: ExpertGroup) -> FusedFn:
    """The fused call of one route; errors as `FusedExperts`."""
    return FusedExperts(plan, route, weights, group)
