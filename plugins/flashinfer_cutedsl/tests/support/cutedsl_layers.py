"""Small layers with runner `flashinfer_cutedsl` on a described Blackwell GPU, bound by hand on the emulated library."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from moe_plugin_flashinfer import plugin

from moe_core.backends.torch import plugin as torch_plugin
from moe_core.bound import BoundExperts
from moe_core.environment import PRESETS, Environment
from moe_core.manager import BackendManager
from moe_core.payloads import PreparedWeights, RawWeights
from moe_core.plan import MoEPlan
from moe_core.planner import make_plan
from moe_core.quant import NVFP4
from moe_core.request import LayerRequest
from moe_core.testing.compare import relative_error
from moe_core.testing.memory import PoisonedMemory
from moe_core.testing.stored import StoredLayer, draw_layer
from moe_core.testing.tolerance import tolerance

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


@attrs.frozen(eq=False)
class SmallLayer:
    """A plan and random weights for it."""

    plan: MoEPlan
    stored: StoredLayer
    manager: BackendManager

    @property
    def raw(self) -> RawWeights:
        """What a checkpoint would bring."""
        return self.stored.raw(self.plan.request.local_experts(0), "cpu")

    def prepare(self) -> PreparedWeights:
        """As the plugin lays it out."""
        return self.manager.process_weights(self.plan, self.raw, None)

    def bind(self, weights: PreparedWeights | None = None) -> BoundExperts:
        """The experts, by default of weights that were prepared for them."""
        return BoundExperts(self.plan, weights or self.prepare(), self.manager)

    def tokens(self, count: int = 17) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random tokens: a slot without expert, a token without any whose values are NaN, an expert without token."""
        generator = torch.Generator().manual_seed(3)
        request = self.plan.request
        hidden = torch.randn(count, request.hidden_size, generator=generator).to(torch.bfloat16)
        ids = torch.rand(count, request.num_experts - 1, generator=generator).topk(request.top_k, dim=1).indices
        ids[0, 0] = -1
        ids[1], hidden[1] = -1, torch.nan
        return hidden, ids, torch.rand(count, request.top_k, generator=generator) + 0.25

    def error(self, experts: BoundExperts | None = None) -> tuple[float, float]:
        """Relative error of a forward in poisoned memory, and what rounding explains."""
        tokens = self.tokens()
        experts = experts or self.bind()
        with PoisonedMemory():  # type: ignore[no-untyped-call]
            out = experts(*tokens)
        answer = self.stored.reference(torch.nan_to_num(tokens[0]), *tokens[1:])
        return relative_error(out, answer), tolerance(self.plan.request, self.plan.routes[0].token_dtype)


def small_layer(kernel: str, machine: Environment = B200, **fields: Any) -> SmallLayer:
    """A layer of one of the runner's kernels."""
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INNER}
    pins = {"quant": NVFP4, "runner_backend": "flashinfer_cutedsl", "a2a_backend": DISPATCHERS[kernel]}
    request, made = LayerRequest(**{**sizes, **pins, **fields}), manager()
    plan, _ = make_plan(made, request, machine)
    return SmallLayer(plan, draw_layer(request, one_input_scale=plan.routes[0].runner.spec.one_input_scale), made)
