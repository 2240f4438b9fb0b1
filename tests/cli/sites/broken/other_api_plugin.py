"""A plugin for another hook interface."""

from __future__ import annotations

from moe_core.hookspecs import hookimpl
from moe_core.specs import PluginSpec


@hookimpl
def declare_backends() -> PluginSpec:
    return PluginSpec(name="other_api", hook_api=2)
