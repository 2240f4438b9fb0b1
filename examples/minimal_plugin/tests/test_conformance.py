"""Every check of moe-core's conformance kit, on every cell that the plugin declares."""

from __future__ import annotations

from moe_core.testing import BackendConformance


class TestConformance(BackendConformance):
    plugin = "moe_plugin_toy_accelerator.plugin"
    # A machine without the device can still test what is emulated there:
    #   environment = moe_core.environment.load_environment("h100"), device = "cpu"
    # What is known to fail, with the reason; it is reported once it passes:
    #   expected_failures = {"odd_sizes*": "the kernel pads to 128"}
