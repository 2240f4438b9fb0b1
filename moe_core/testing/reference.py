"""The answer: a layer in float64, slot by slot in the order in which they come.

It has no permutation, no grouping and no padding, so that it shares no such fault with a backend. Shapes as in
`moe_core.payloads`; `E` experts of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import torch

from moe_core.activation import ActivationSpec
from moe_core.payloads import ActivationFn, PostNormFn, Tensor
from moe_core.testing.rounding import Rounder, unrounded


def _element_wise(x: Tensor, spec: ActivationSpec) -> Tensor:
    if spec.kind == "silu":
        return x / (1.0 + torch.exp(-spec.alpha * x))
    if spec.kind == "gelu":
        return x * (1.0 + torch.erf(x / math.sqrt(2.0))) / 2.0
    if spec.kind == "gelu_tanh":
        return x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))) / 2.0
    positive = x.clamp(min=0.0)
    return positive if spec.kind == "relu" else positive**2


def activate(h: Tensor, spec: ActivationSpec) -> Tensor:
    """`[n, 2I]` (`[n, I]` when not gated) -> `[n, I]` by the formulas of `ActivationSpec`."""
    if not spec.gated:
        return _element_wise(h, spec)
    gate, up = (h[:, 0::2], h[:, 1::2]) if spec.row_order == "interleaved" else h.tensor_split(2, dim=1)
    if spec.limit is not None:
        up = up.clamp(-spec.limit, spec.limit)
        if spec.clamp == "before":
            gate = gate.clamp(max=spec.limit)
    value = _element_wise(gate, spec)
    if spec.limit is not None and spec.clamp == "after":
        value = value.clamp(max=spec.limit)
    return value * (up + spec.beta)


@attrs.frozen(eq=False, kw_only=True)
class ReferenceLayer:
    """All experts of a layer, as float64 values.

    Attributes:
        w13: `[E, 2I, H]` (`[E, I, H]` when not gated), rows as `activation.row_order` says.
        w2: `[E, H, I]`.
        activation: What happens between the GEMMs.
        b13: `[E, 2I]` or None.
        b2: `[E, H]` or None.
        module: The callable of an activation of kind `module`.
        post_norm: The callable after each expert's second GEMM.
        weight_on_input: Whether the router weight multiplies the input instead of the output.
        round1: What the scheme does to the input of the first GEMM.
        round2: What it does to the input of the second.
        weighting: What is done with a router weight; another reading of it for a backend that applies it wrongly.
    """

    w13: Tensor
    w2: Tensor
    activation: ActivationSpec
    b13: Tensor | None = None
    b2: Tensor | None = None
    module: ActivationFn | None = None
    post_norm: PostNormFn | None = None
    weight_on_input: bool = False
    round1: Rounder = unrounded
    round2: Rounder = unrounded
    weighting: Callable[[float], float] = float

    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """`[T, H]`, `[T, K]`, `[T, K]` -> float64 `[T, H]` on the CPU; a slot with a negative id adds nothing."""
        tokens = hidden_states.detach().cpu().double()
        output = torch.zeros_like(tokens)
        # Token, expert and weight of every slot that has an expert, in the order of slots.
        slots = [
            (token, expert, self.weighting(weight))
            for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weights.tolist(), strict=True))
            for expert, weight in zip(ids, weights, strict=True)
            if expert >= 0
        ]
        if slots:
            source, experts, weights = map(list, zip(*slots, strict=True))
            rows = self._slots(tokens[source], experts, torch.tensor(weights, dtype=torch.float64)[:, None])
            for token, row in zip(source, rows, strict=True):
                output[token] += row
        return output

    def _slots(self, rows: Tensor, experts: list[int], weights: Tensor) -> Tensor:
        """What each slot adds to its token: its token's row `[S, H]` -> `[S, H]`."""
        rows = self.round1(rows * weights if self.weight_on_input else rows, experts)
        h = _by_expert(rows, self.w13, self.b13, experts)
        h = self.module(h) if self.module is not None else activate(h, self.activation)
        out = _by_expert(self.round2(h, experts), self.w2, self.b2, experts)
        out = out if self.post_norm is None else self.post_norm(out)
        return out if self.weight_on_input else out * weights


def _by_expert(rows: Tensor, matrices: Tensor, biases: Tensor | None, experts: list[int]) -> Tensor:
    """Each row times its own expert's matrix, one at a time."""
    products = torch.stack([matrices[expert] @ row for row, expert in zip(rows, experts, strict=True)])
    return products if biases is None else products + biases[experts]
