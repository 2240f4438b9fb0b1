"""Weights, tokens and bound layers for tests of a plugin's own beside the kit's: every rank of a test draws the same.

Example:
    >>> from moe_core import LayerRequest
    >>> from moe_core.testing.compare import relative_error
    >>> from moe_core.testing.examples import stored_layer, telling_tokens
    >>> request = LayerRequest(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32)
    >>> tokens = telling_tokens(request, 5, seed=0)
    >>> answer = stored_layer(request).reference(*tokens)
    >>> relative_error(answer.bfloat16(), answer) < 1e-2
    True
"""

from __future__ import annotations

import functools

import attrs
import torch

from moe_core.bound import BoundExperts
from moe_core.manager import BackendManager
from moe_core.payloads import TORCH_DTYPES, PreparedWeights, RawWeights, Tensor
from moe_core.plan import MoEPlan
from moe_core.request import LayerRequest
from moe_core.testing.compare import layer_error
from moe_core.testing.memory import PoisonedMemory
from moe_core.testing.stored import DrawnLayer, draw_layer
from moe_core.testing.tolerance import tolerance

#: What weights depend on; not on the ranks, machines and workloads that share them.
_FIELDS = (
    "num_experts",
    "top_k",
    "hidden_size",
    "intermediate_size",
    "activation",
    "dtype",
    "quant",
    "bias",
    "weight_on_input",
    "post_norm",
)

_drawn = functools.cache(draw_layer)


def stored_layer(request: LayerRequest, seed: int = 0, one_input_scale: bool = False) -> DrawnLayer:
    """Random weights of all experts, with the float64 layer that they mean; arguments as of `draw_layer`.

    Requests that differ in who computes, and where, get the same.
    """
    return _drawn(LayerRequest(**{name: getattr(request, name) for name in _FIELDS}), seed, one_input_scale)


def telling_tokens(request: LayerRequest, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens `[count, H]`, ids and weights, with what is easily got wrong.

    Expert 1 has no token, the first token a slot without expert, the second no expert at all and NaN for values. Router
    weights are far from one, so that a weight too many or too few shows.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, request.hidden_size, generator=generator).to(TORCH_DTYPES[request.dtype])
    scores = torch.rand(count, request.num_experts, generator=generator)
    scores[:, 1:2] = -1
    ids = scores.topk(request.top_k, dim=1).indices
    if count > 2:
        ids[0, 0] = -1
        ids[1], hidden[1] = -1, torch.nan
    return hidden, ids, torch.rand(count, request.top_k, generator=generator) / 2 + 0.1


@attrs.frozen(eq=False)
class ExampleLayer:
    """A plan of one rank on the CPU and weights for it, to take apart what `MoELayer` does in one step.

    Attributes:
        plan: Of the first rank.
        stored: The weights of all experts.
        manager: Whose plugins prepare and bind.
    """

    plan: MoEPlan
    stored: DrawnLayer
    manager: BackendManager

    @property
    def raw(self) -> RawWeights:
        """What a checkpoint would bring."""
        return self.stored.raw(self.plan.request.local_experts(0), "cpu")

    def prepare(self, raw: RawWeights | None = None, out: PreparedWeights | None = None) -> PreparedWeights:
        """Weights, by default `raw`, as the plan's plugin lays them out."""
        return self.manager.process_weights(self.plan, raw or self.raw, out)

    def bind(self, weights: PreparedWeights | None = None) -> BoundExperts:
        """The experts, by default of weights that were prepared for them."""
        return BoundExperts(self.plan, weights or self.prepare(), self.manager)

    def tokens(self, count: int = 17) -> tuple[Tensor, Tensor, Tensor]:
        """See `telling_tokens`."""
        return telling_tokens(self.plan.request, count, seed=3)

    def error(self, experts: BoundExperts | None = None) -> tuple[float, float]:
        """Relative error of a forward in poisoned memory, and what rounding explains."""
        tokens = self.tokens()
        experts = experts or self.bind()
        with PoisonedMemory():  # type: ignore[no-untyped-call]
            output = experts(*tokens)
        allowed = tolerance(self.plan.request, self.plan.routes[0].token_dtype)
        return layer_error(output, self.stored.reference, tokens, allowed), allowed
