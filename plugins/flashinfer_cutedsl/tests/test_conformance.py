"""Every check of the conformance kit on every cell of the plugin that needs one rank, on the emulated library."""

from __future__ import annotations

import attrs

from moe_core.environment import PRESETS
from moe_core.testing import BackendConformance


class TestConformance(BackendConformance):
    plugin = "moe_plugin_flashinfer.plugin"
    environment = PRESETS["b200"]
    device = "cpu"


class TestConformanceOfRubin(TestConformance):
    environment = attrs.evolve(PRESETS["b200"], arch="sm107", device_name="described", source="described")
