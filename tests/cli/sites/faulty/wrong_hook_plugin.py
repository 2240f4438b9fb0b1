"""A plugin with a hook that does not exist."""

from __future__ import annotations

from moe_core.hookspecs import hookimpl
from moe_core.specs import PluginSpec


@hookimpl
def declare_backends() -> PluginSpec:
    return PluginSpec(name="wrong_hook", hook_api=1)


@hookimpl
def fused_expert(plan, route, weights):
    raise NotImplementedError
