"""A small experts class as another library would decorate it, to derive variants from."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn
from transformers.integrations.moe import use_experts_implementation

from moe_core.integrations.transformers import NAME


@attrs.define
class TinyConfig:
    _experts_implementation: str = attrs.field(default=NAME, alias="_experts_implementation")


class PlainExperts(nn.Module):
    """Four experts of H 8 and I 6 in the default layout; variants of it are refused."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.num_experts = 4
        generator = torch.Generator().manual_seed(1)
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8, generator=generator))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6, generator=generator))
        self.act_fn: Any = nn.SiLU()

    def activated(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for token, slot in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])):
            expert = ids[token, slot]
            rows = self.activated(self.gate_up_proj[expert] @ hidden_states[token])
            out[token] += weights[token, slot] * (self.down_proj[expert] @ rows)
        return out


class OwnGate(PlainExperts):
    """Its gate is no known activation."""

    def activated(self, rows: torch.Tensor) -> torch.Tensor:
        return self._apply_gate(rows)

    def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return 3.0 * torch.tanh(gate / 3.0) * torch.sigmoid(gate) * up


def tiny_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_states = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    return hidden_states, torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.tensor([[0.5, 0.2], [0.7, 0.3], [0.1, 1.5]])


def decorate(experts_class: type[nn.Module], **flags: bool) -> nn.Module:
    derived = type(experts_class.__name__, (experts_class,), {"forward": experts_class.forward})
    return use_experts_implementation(derived, **flags)(TinyConfig())


@torch.no_grad()
def eager(experts: nn.Module, *arguments: torch.Tensor) -> torch.Tensor:
    return type(experts).forward.__wrapped__(experts, *arguments)
