"""Wrong experts: what the kit's comparison with the answer must find, and name."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import toy_backend as toy
from toy_backend import Tensor, Weights, expert_row


def swapped_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    half = weights.tensors["w13"].shape[1] // 2
    tensors = {name: t.roll(half, 1) if name in ("w13", "b13") else t for name, t in weights.tensors.items()}
    return expert_row(x, expert, attrs.evolve(weights, tensors=tensors))


def plain_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    plain = attrs.evolve(weights.spec, alpha=1.0, limit=None, beta=0.0, clamp="before")
    return expert_row(x, expert, attrs.evolve(weights, spec=plain))


def unbiased_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    tensors = {name: tensor for name, tensor in weights.tensors.items() if not name.startswith("b")}
    return expert_row(x, expert, attrs.evolve(weights, tensors=tensors))


def exact_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    return expert_row(x, expert, attrs.evolve(weights, rounds=False))


def coarse_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    return expert_row(x, expert, weights).to(torch.float8_e4m3fn).float()


def sixteenths_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    """Reads whole blocks of 16 channels only."""
    x = x.clone()
    x[len(x) // 16 * 16 :] = 0
    return expert_row(x, expert, weights)


def weighted_twice(tokens: Any, row: Any) -> Tensor:
    return toy.standard(attrs.evolve(tokens, topk_weights=tokens.topk_weights**2), row)


def wide_rows(tokens: Any, row: Any) -> Tensor:
    return toy.contiguous(tokens, row).float()


def gelu_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    return expert_row(x, expert, attrs.evolve(weights, activation=gelu_gate))


def gelu_gate(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


def inverted_scales_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    tensors = {name: 1.0 / t if name.endswith("_scale") else t for name, t in weights.tensors.items()}
    return expert_row(x, expert, attrs.evolve(weights, tensors=tensors))


def transposed_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    """Takes `w2` to lie as its GEMM would like it."""
    w2 = weights.tensors["w2"]
    turned = w2.reshape(w2.shape[0], w2.shape[2], w2.shape[1]).mT
    return expert_row(x, expert, attrs.evolve(weights, tensors={**weights.tensors, "w2": turned}))


def first_scale_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    scales = {name: t[:1].expand(len(t)) for name, t in weights.tensors.items() if name.endswith("_input_scale")}
    return expert_row(x, expert, attrs.evolve(weights, tensors=weights.tensors | scales))


def wide_output(tokens: Any, row: Any) -> Tensor:
    return toy.standard(tokens, row).float()
