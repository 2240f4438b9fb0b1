"""Small layers with runner `flashinfer_cutedsl` on a described Blackwell GPU, bound by hand on the emulated library."""

from __future__ import annotations

from typing import Any

import attrs
from moe_plugin_flashinfer import plugin

from moe_core.backends.torch import plugin as torch_plugin
from moe_core.environment import PRESETS, Environment
from moe_core.manager import BackendManager
from moe_core.planner import make_plan
from moe_core.quant import NVFP4
from moe_core.request import LayerRequest
from moe_core.testing.examples import ExampleLayer, stored_layer

#: Kernel of the runner -> the local dispatcher in whose format it reads tokens.
DISPATCHERS = {"masked": "none.masked", "wrapper": "none.standard"}
HIDDEN, INNER, EXPERTS, TOP_K = 256, 192, 4, 2
B200 = PRESETS["b200"]
#: With a release that has no sum of slots in two stages.
EARLIER = attrs.evolve(B200, packages=dict(B200.packages) | {"flashinfer": "0.6.11"})


class _OnBlackwell(BackendManager):
    """Takes the machine that it is asked about for a B200, wherever the weights lie."""

    def probe(self, device_type: str | None = None) -> Environment:
        """The described GPU."""
        return B200


def manager() -> BackendManager:
    """The plugin beside the built-in one."""
    made = _OnBlackwell()
    made.register("torch", torch_plugin)
    made.register("flashinfer_cutedsl", plugin)
    return made


def small_layer(kernel: str, machine: Environment = B200, **fields: Any) -> ExampleLayer:
    """A layer of one of the runner's kernels."""
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INNER}
    pins = {"quant": NVFP4, "runner_backend": "flashinfer_cutedsl", "a2a_backend": DISPATCHERS[kernel]}
    request, made = LayerRequest(**{**sizes, **pins, **fields}), manager()
    plan, _ = make_plan(made, request, machine)
    return ExampleLayer(plan, stored_layer(request, one_input_scale=plan.routes[0].runner.spec.one_input_scale), made)
