"""The backend `ascend_npu`: what it declares, and its hooks. Importing this needs neither torch nor torch_npu."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core.hookspecs import hookimpl
from moe_core.layout_modules import layout_module
from moe_core.specs import PluginSpec
from moe_plugin_ascend import deepep_specs, fuseep_specs, local_specs, runner_specs, variables
from moe_plugin_ascend.machine import GENERATIONS, TORCH_NPU

if TYPE_CHECKING:
    from moe_core.payloads import ExpertGroup, ExpertsFn, FusedFn, PreparedWeights, RawWeights
    from moe_core.plan import MoEPlan, Route

#: Weight layout -> module that makes it and binds experts to it.
LAYOUTS = {**runner_specs.LAYOUTS, **fuseep_specs.LAYOUTS}


@hookimpl
def declare_backends() -> PluginSpec:
    """Everything that this plugin can do on an Ascend machine."""
    return PluginSpec(
        name="ascend_npu",
        hook_api=1,
        description="grouped GEMMs of torch_npu and DeepEP for Ascend",
        dispatchers=(*local_specs.DISPATCHERS, *deepep_specs.DISPATCHERS),
        runners=(*runner_specs.RUNNERS, *fuseep_specs.RUNNERS),
        requirements=(TORCH_NPU,),
        variables=variables.SET_BY_CALLS,
        generations=GENERATIONS,
    )


@hookimpl
def process_weights_after_loading(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Lay out a layer's weights as the operators of the plan's runner read them."""
    return layout_module(LAYOUTS, plan.weight_layout).prepare(plan, weights, out)


@hookimpl
def fused_experts(plan: MoEPlan, route: Route, weights: PreparedWeights, group: ExpertGroup) -> ExpertsFn | FusedFn:
    """Bind the experts of one route; only a fused one communicates."""
    if route.dispatcher is None:
        from moe_plugin_ascend import fuseep

        return fuseep.bind(plan, route, weights, group)
    return layout_module(LAYOUTS, plan.weight_layout).bind(plan, route, weights)
