"""The built-in torch backend in the kit, one freedom varied at a time; `moe-core verify torch` tries all with all."""

from __future__ import annotations

from moe_core.testing import BackendConformance


class TestTorch(BackendConformance):
    plugin = "moe_core.backends.torch.plugin"
    device = "cpu"
    quick = True
