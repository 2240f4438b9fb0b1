"""The backend `flashinfer_cutedsl`: what it declares, and its hooks. Importing this needs neither torch nor kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core.hookspecs import hookimpl
from moe_core.layout_modules import layout_module
from moe_core.specs import PluginSpec
from moe_plugin_flashinfer.runner_specs import LAYOUTS, RUNNERS

if TYPE_CHECKING:
    from moe_core.payloads import ExpertsFn, PreparedWeights, RawWeights
    from moe_core.plan import MoEPlan, Route


@hookimpl
def declare_backends() -> PluginSpec:
    """Everything that this plugin can do on a Blackwell GPU."""
    return PluginSpec(
        name="flashinfer_cutedsl",
        hook_api=1,
        description="NVFP4 experts through FlashInfer's CuteDSL kernels",
        runners=RUNNERS,
    )


@hookimpl
def process_weights_after_loading(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Lay out a layer's weights as the kernels of the plan's runner read them."""
    return layout_module(LAYOUTS, plan.weight_layout).prepare(plan, weights, out)


@hookimpl
def fused_experts(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """Bind the experts of one route."""
    return layout_module(LAYOUTS, plan.weight_layout).bind(plan, route, weights)
