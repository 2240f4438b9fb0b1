"""A toy that a device graph can hold, and what breaks that: each is right in every forward that is not replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import toy_backend as toy
from toy_backend import Parts, Tensor


def bound_to(standard: Callable[..., Tensor]) -> Callable[..., Any]:
    """Experts `standard(tokens, row, number of experts)`."""

    def bind(parts: Parts, weights: toy.Weights, plan: Any) -> Any:
        def row(x: Tensor, expert: int) -> Tensor:
            return parts.expert_row(x, expert, weights)

        return lambda tokens: standard(tokens, row, len(weights.tensors["w13"]))

    return bind


def fixed(tokens: Any, row: Any, num_experts: int) -> Tensor:
    """Every token at every expert; what was not chosen is left out where it is added up."""
    hidden, ids = tokens.hidden_states, tokens.topk_ids
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in range(num_experts):
        chosen = ids == expert
        weight = torch.where(chosen, tokens.topk_weights.float(), 0.0).sum(1)
        for token in range(len(hidden)):
            is_here = chosen[token].any()
            x = torch.where(is_here, hidden[token], 0.0)
            out[token] += torch.where(is_here, row(x, expert) * weight[token], 0.0)
    return out.to(hidden.dtype)


def graph_safe(standard: Callable[..., Tensor] = fixed) -> Parts:
    return Parts(bind=bound_to(standard), runner={"graph_safe": True})


def on_the_host(tokens: Any, row: Any, num_experts: int) -> Tensor:
    return toy.standard(tokens, row)


def with_mask(tokens: Any, row: Any, num_experts: int) -> Tensor:
    """The shape of what it multiplies depends on the routing."""
    out = torch.zeros(tokens.hidden_states.shape, dtype=torch.float32)
    for expert in range(num_experts):
        for slot in range(tokens.topk_ids.shape[1]):
            mask = tokens.topk_ids[:, slot] == expert
            rows = [row(x, expert) for x in tokens.hidden_states[mask]]
            if rows:
                out[mask] += torch.stack(rows) * tokens.topk_weights[mask, slot, None].float()
    return out.to(tokens.hidden_states.dtype)


class Planned:
    """Plans ahead: during a capture it takes the routing of the forward before."""

    def __init__(self) -> None:
        self.ids = torch.empty(0, 0)

    def standard(self, tokens: Any, row: Any, num_experts: int) -> Tensor:
        if not torch.compiler.is_compiling() or self.ids.shape != tokens.topk_ids.shape:
            self.ids = tokens.topk_ids.clone()
        return fixed(attrs.evolve(tokens, topk_ids=self.ids), row, num_experts)


def uploading(tokens: Any, row: Any, num_experts: int) -> Tensor:
    """Brings a table of Python values to the device in every forward."""
    ones = torch.tensor([1.0] * tokens.hidden_states.shape[1])
    return (fixed(tokens, row, num_experts) * ones).to(tokens.hidden_states.dtype)
