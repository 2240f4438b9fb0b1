"""A local dispatcher with the calibrated scale of the weights: it multiplies tokens by it, and sends them so."""

from __future__ import annotations

from typing import Any

import attrs

from moe_core.backends.torch import local
from moe_core.payloads import ExpertGroup, Tensor
from moe_core.plan import MoEPlan, Route
from moe_core.specs import TokenDtype


def bind(plan: MoEPlan, route: Route, group: ExpertGroup, token_scale: Tensor) -> tuple[Any, Any]:
    """Dispatch and combine; the scale is read in every forward, as a kernel would."""
    send, combine = local.bind_standard(plan, attrs.evolve(route, token_dtype=TokenDtype(plan.request.dtype)), group)

    def dispatch(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Any, Any]:
        return send(hidden_states * token_scale, topk_ids, topk_weights)

    return dispatch, combine
