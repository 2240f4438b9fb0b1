"""Small layers on the emulated library, bound by hand."""

from __future__ import annotations

from typing import Any

import emulated_deep_gemm
from moe_plugin_deepgemm import plugin

from moe_core.backends.torch import plugin as torch_plugin
from moe_core.backends.triton import plugin as triton_plugin
from moe_core.environment import PRESETS, Environment
from moe_core.manager import BackendManager
from moe_core.planner import make_plan
from moe_core.quant import BF16, FP8_BLOCK128_UE8M0
from moe_core.request import LayerRequest
from moe_core.testing.examples import ExampleLayer, stored_layer

HIDDEN, INNER = 256, 128


def small_layer(quant: Any = BF16, format_: str = "contiguous", **fields: Any) -> ExampleLayer:
    """A layer with runner deep_gemm; on Blackwell where the scheme is for that."""
    emulated_deep_gemm.install()
    manager = BackendManager()
    for name, module in (("torch", torch_plugin), ("triton", triton_plugin), ("cuda_deepgemm", plugin)):
        manager.register(name, module)
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": HIDDEN, "intermediate_size": INNER}
    pins = {"runner_backend": "deep_gemm", "a2a_backend": f"none.{format_}"}
    request = LayerRequest(**{**sizes, "quant": quant, **pins, **fields})
    machine: Environment = PRESETS["b200" if quant == FP8_BLOCK128_UE8M0 else "h100"]
    plan, _ = make_plan(manager, request, machine)
    return ExampleLayer(plan, stored_layer(request), manager)
