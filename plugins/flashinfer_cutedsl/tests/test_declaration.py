from __future__ import annotations

import pickle

from moe_plugin_flashinfer.plugin import LAYOUTS, declare_backends


def test_every_layout_has_its_module() -> None:
    spec = declare_backends()
    assert {runner.weight_layout for runner in spec.runners} == set(LAYOUTS)
    assert pickle.loads(pickle.dumps(spec)) == spec
