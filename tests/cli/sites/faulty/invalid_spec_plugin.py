"""A plugin whose declaration makes no sense."""

from __future__ import annotations

from moe_core.hookspecs import hookimpl
from moe_core.specs import PluginSpec, Requirement


@hookimpl
def declare_backends() -> PluginSpec:
    return PluginSpec(name="invalid", hook_api=1, requirements=(Requirement(module="x", minimum="newest"),))
