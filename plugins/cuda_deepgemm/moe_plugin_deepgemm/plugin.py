"""The backend `cuda_deepgemm`: what it declares, and its hooks. Importing this needs neither torch nor DeepGEMM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core.hookspecs import hookimpl
from moe_core.layout_modules import layout_module
from moe_core.specs import PluginSpec
from moe_plugin_deepgemm.deepep_specs import DISPATCHERS
from moe_plugin_deepgemm.runner_specs import LAYOUTS, RUNNERS

if TYPE_CHECKING:
    from moe_core.payloads import ExpertsFn, PreparedWeights, RawWeights
    from moe_core.plan import MoEPlan, Route


@hookimpl
def declare_backends() -> PluginSpec:
    """Everything that this plugin can do; what needs which library is said by each part."""
    return PluginSpec(
        name="cuda_deepgemm",
        hook_api=1,
        description="grouped GEMMs of DeepGEMM and dispatch by DeepEP",
        dispatchers=DISPATCHERS,
        runners=RUNNERS,
    )


@hookimpl
def process_weights_after_loading(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Lay out a layer's weights as the plan's runner reads them."""
    return layout_module(LAYOUTS, plan.weight_layout).prepare(plan, weights, out)


@hookimpl
def fused_experts(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """Bind the experts of one route."""
    return layout_module(LAYOUTS, plan.weight_layout).bind(plan, route, weights)
