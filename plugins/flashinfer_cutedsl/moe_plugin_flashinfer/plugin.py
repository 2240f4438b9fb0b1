"""The backend `flashinfer_cutedsl`: what it declares, and its hooks. Importing this needs neither torch nor kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from moe_core.errors import PluginError
from moe_core.hookspecs import hookimpl
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
    _require_layout(plan)
    from moe_plugin_flashinfer.weights import prepare

    return prepare(plan, weights, out)


@hookimpl
def fused_experts(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """Bind the experts of one route."""
    _require_layout(plan)
    module = importlib.import_module(LAYOUTS[route.runner.spec.weight_layout])
    return module.bind(plan, route, weights)  # type: ignore[no-any-return]


def _require_layout(plan: MoEPlan) -> None:
    if plan.weight_layout not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise PluginError(
            f"flashinfer_cutedsl makes the weight layouts {known}; the plan asks for {plan.weight_layout!r}"
        )
