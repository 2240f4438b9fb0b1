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
class Slots:
    """The `S` slots of a forward that have an expert.

    Attributes:
        source: The token of each.
        experts: The expert of each.
        weights: `[S, 1]` float64, what is made of the router weight.
        tokens: `[S, H]` float64, the row of its token.
    """

    source: list[int]
    experts: list[int]
    weights: Tensor
    tokens: Tensor


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
        slots = self.slots(hidden_states, topk_ids, topk_weights)
        output = torch.zeros(hidden_states.shape, dtype=torch.float64)
        if slots.source:
            for token, row in zip(slots.source, self.finished(self.rows(slots), slots), strict=True):
                output[token] += row
        return output

    def slots(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Slots:
        """What is to be computed of a forward's `[T, H]`, `[T, K]`, `[T, K]`, in the order of slots."""
        found = [
            (token, expert, self.weighting(weight))
            for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weights.tolist(), strict=True))
            for expert, weight in zip(ids, weights, strict=True)
            if expert >= 0
        ]
        source, experts, weights = (list(column) for column in zip(*found, strict=True)) if found else ([], [], [])
        return Slots(
            source=source,
            experts=experts,
            weights=torch.tensor(weights, dtype=torch.float64)[:, None],
            tokens=hidden_states.detach().cpu().double()[source],
        )

    def inputs(self, slots: Slots) -> Tensor:
        """What the scheme rounds before the first GEMM, `[S, H]`."""
        return slots.tokens * slots.weights if self.weight_on_input else slots.tokens

    def activated(self, h: Tensor) -> Tensor:
        """The result of the first GEMM `[S, 2I]` (or `[S, I]`) -> `[S, I]`."""
        return self.module(h) if self.module is not None else activate(h, self.activation)

    def rows(self, slots: Slots) -> Tensor:
        """The result of the second GEMM, `[S, H]`."""
        experts = slots.experts
        h = by_expert(self.round1(self.inputs(slots), experts), self.w13, self.b13, experts)
        return by_expert(self.round2(self.activated(h), experts), self.w2, self.b2, experts)

    def finished(self, rows: Tensor, slots: Slots) -> Tensor:
        """What each slot adds to its token, from its result of the second GEMM, `[S, H]`."""
        out = rows if self.post_norm is None else self.post_norm(rows)
        return out if self.weight_on_input else out * slots.weights


def by_expert(rows: Tensor, matrices: Tensor, biases: Tensor | None, experts: list[int]) -> Tensor:
    """Each row times its own expert's matrix, one at a time."""
    products = torch.stack([matrices[expert] @ row for row, expert in zip(rows, experts, strict=True)])
    return products if biases is None else products + biases[experts]
