"""Every check of the conformance kit on every cell of the plugin that needs one rank, on the emulated library."""

from __future__ import annotations

from moe_core.environment import PRESETS
from moe_core.testing import BackendConformance


class TestConformance(BackendConformance):
    plugin = "moe_plugin_flashinfer.plugin"
    environment = PRESETS["b200"]
    device = "cpu"
