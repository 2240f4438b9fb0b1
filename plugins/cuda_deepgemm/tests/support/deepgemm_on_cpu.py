"""The plugin with its libraries emulated in whatever process binds a route, for the kit's fresh processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import attrs
from moe_plugin_deepgemm import plugin
from moe_plugin_deepgemm.deepep_specs import DISPATCHERS
from moe_plugin_deepgemm.plugin import process_weights_after_loading

from moe_core.hookspecs import hookimpl
from moe_core.specs import PluginSpec

if TYPE_CHECKING:
    from moe_core.payloads import ExpertGroup, ExpertsFn, PreparedWeights
    from moe_core.plan import MoEPlan, Route

__all__ = ["bind", "declare_backends", "fused_experts", "process_weights_after_loading"]

_BINDERS = {spec.mode: spec.binder for spec in DISPATCHERS}


@hookimpl
def declare_backends() -> PluginSpec:
    """As the plugin's, with binders that emulate first."""
    dispatchers = [attrs.evolve(spec, binder=f"{__name__}:bind") for spec in DISPATCHERS]
    return attrs.evolve(plugin.declare_backends(), dispatchers=dispatchers)


@hookimpl
def fused_experts(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """As the plugin's."""
    import emulated_deep_gemm

    emulated_deep_gemm.install()
    return plugin.fused_experts(plan, route, weights)


def bind(plan: MoEPlan, route: Route, group: ExpertGroup) -> Any:
    """As the dispatcher's binder."""
    import emulated_deep_ep

    emulated_deep_ep.install()
    module, _, name = _BINDERS[route.dispatcher.spec.mode].partition(":")  # type: ignore[union-attr]
    return getattr(importlib.import_module(module), name)(plan, route, group)
