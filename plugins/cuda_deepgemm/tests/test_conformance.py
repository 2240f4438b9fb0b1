"""Every check of the conformance kit on every pair, over an emulated compiled layer.

Quick: each runner has one scheme and one dtype, so that nothing is left out but activations with every form of tokens.
"""

from __future__ import annotations

from moe_core.environment import PRESETS
from moe_core.testing import BackendConformance


class TestHopper(BackendConformance):
    plugin = "deepgemm_on_cpu"
    environment = PRESETS["h100"]
    device = "cpu"
    quick = True


class TestBlackwell(BackendConformance):
    plugin = "deepgemm_on_cpu"
    environment = PRESETS["b200"]
    device = "cpu"
    quick = True
