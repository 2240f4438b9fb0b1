"""A plugin that takes its time."""

from __future__ import annotations

import time

from moe_core.hookspecs import hookimpl
from moe_core.specs import PluginSpec

time.sleep(2.1)


@hookimpl
def declare_backends() -> PluginSpec:
    return PluginSpec(name="slow", hook_api=1)
