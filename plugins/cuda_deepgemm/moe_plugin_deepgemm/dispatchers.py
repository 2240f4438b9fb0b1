"""Declarations of the dispatchers of this plugin."""

from __future__ import annotations

from moe_core.specs import DispatcherSpec
from moe_plugin_deepgemm import deepep_specs

DISPATCHERS: tuple[DispatcherSpec, ...] = deepep_specs.DISPATCHERS
