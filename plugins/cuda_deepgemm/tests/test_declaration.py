from __future__ import annotations

import pickle

from moe_plugin_deepgemm.plugin import declare_backends
from moe_plugin_deepgemm.runner_specs import LAYOUTS


def test_every_layout_has_its_module() -> None:
    spec = declare_backends()
    assert {runner.weight_layout for runner in spec.runners} == set(LAYOUTS)
    assert pickle.loads(pickle.dumps(spec)) == spec
