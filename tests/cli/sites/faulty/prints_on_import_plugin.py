"""A plugin that greets."""

from __future__ import annotations

from moe_core.hookspecs import hookimpl
from moe_core.specs import PluginSpec

print("welcome to prints")


@hookimpl
def declare_backends() -> PluginSpec:
    return PluginSpec(name="prints", hook_api=1)
