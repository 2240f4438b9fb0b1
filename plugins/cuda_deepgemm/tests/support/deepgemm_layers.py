"""Small layers on the emulated library, bound by hand."""

from __future__ import annotations

from typing import Any

import attrs
import emulated_deep_gemm
import torch
from moe_plugin_deepgemm import plugin

from moe_core.backends.torch import plugin as torch_plugin
from moe_core.backends.triton import plugin as triton_plugin
from moe_core.bound import BoundExperts
from moe_core.environment import PRESETS, Environment
from moe_core.manager import BackendManager
from moe_core.payloads import PreparedWeights, RawWeights
from moe_core.plan import MoEPlan
from moe_core.planner import make_plan
from moe_core.quant import BF16, FP8_BLOCK128_UE8M0
from moe_core.request import LayerRequest
from moe_core.testing.compare import relative_error
from moe_core.testing.stored import StoredLayer, draw_layer
from moe_core.testing.tolerance import tolerance

HIDDEN, INNER = 256, 128


@attrs.frozen(eq=False)
class SmallLayer:
    """A plan and random weights for it."""

    plan: MoEPlan
    stored: StoredLayer
    manager: BackendManager

    @property
    def raw(self) -> RawWeights:
        return self.stored.raw(self.plan.request.local_experts(0), "cpu")

    def prepare(self, raw: RawWeights | None = None, out: PreparedWeights | None = None) -> PreparedWeights:
        return self.manager.process_weights(self.plan, raw or self.raw, out)

    def bind(self, weights: PreparedWeights | None = None) -> BoundExperts:
        return BoundExperts(self.plan, weights or self.prepare(), self.manager)

    def tokens(self, count: int = 17) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        request = self.plan.request
        hidden = torch.randn(count, request.hidden_size, generator=generator).to(torch.bfloat16)
        ids = torch.rand(count, request.num_experts, generator=generator).topk(request.top_k, dim=1).indices
        return hidden, ids, torch.rand(count, request.top_k, generator=generator) + 0.25

    def error(self, experts: BoundExperts | None = None) -> tuple[float, float]:
        """Relative error of a forward, and what rounding explains."""
        tokens = self.tokens()
        found = relative_error((experts or self.bind())(*tokens), self.stored.reference(*tokens))
        return found, tolerance(self.plan.request, self.plan.routes[0].token_dtype)


def small_layer(quant: Any = BF16, format_: str = "contiguous", **fields: Any) -> SmallLayer:
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
    return SmallLayer(plan, draw_layer(request), manager)
