"""Wrong about routings, batches and sizes at their edges: what a kernel's usual tokens do not show."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import torch
import toy_backend as toy
from toy_backend import Tensor, Weights


def last_for_none(tokens: Any, row: Any) -> Tensor:
    return toy.standard(attrs.evolve(tokens, topk_ids=tokens.topk_ids % 5), row)


def dense(tokens: Any, row: Any) -> Tensor:
    """Every expert for every token, times a zero weight for those that were not chosen."""
    out = torch.zeros(tokens.hidden_states.shape, dtype=torch.float32)
    for token, expert in itertools.product(range(len(out)), range(5)):
        weight = (tokens.topk_weights[token].float() * (tokens.topk_ids[token] == expert)).sum()
        x = tokens.hidden_states[token] if weight != 0 else torch.ones_like(tokens.hidden_states[token])
        out[token] += row(x, expert) * weight
    return out.to(tokens.hidden_states.dtype)


def with_capacity(tokens: Any, row: Any) -> Tensor:
    """Drops what an expert gets beyond five rows."""
    ids = tokens.topk_ids.clone()
    for expert in range(5):
        for token, slot in (ids == expert).nonzero().tolist()[5:]:
            ids[token, slot] = -1
    return toy.standard(attrs.evolve(tokens, topk_ids=ids), row)


def needs_a_token(tokens: Any, row: Any) -> Tensor:
    largest = int(tokens.topk_ids.max())
    return toy.standard(tokens, row) if largest >= -1 else tokens.hidden_states


def once_per_row(tokens: Any, row: Any) -> Tensor:
    ids = tokens.topk_ids.clone()
    for slot in range(1, ids.shape[1]):
        ids[(ids[:, slot, None] == ids[:, :slot]).any(1), slot] = -1
    return toy.standard(attrs.evolve(tokens, topk_ids=ids), row)


def one_tile(tokens: Any, row: Any) -> Tensor:
    """Computes at most eight rows of an expert."""
    return toy.contiguous(attrs.evolve(tokens, num_tokens_per_expert=tokens.num_tokens_per_expert.clamp(max=8)), row)


def as_if_contiguous(tokens: Any, row: Any) -> Tensor:
    ids = tokens.topk_ids
    return toy.standard(attrs.evolve(tokens, topk_ids=ids.as_strided(ids.shape, (ids.shape[1], 1))), row)


def up_to_missing(tokens: Any, row: Any) -> Tensor:
    """Ends a token's loop at its first -1."""
    ids = tokens.topk_ids
    ids = torch.where((ids < 0).cumsum(1) > 0, -1, ids)
    return toy.standard(attrs.evolve(tokens, topk_ids=ids), row)


def one_token_alone(tokens: Any, row: Any) -> Tensor:
    """A way of its own for one token, which takes -1 for the first expert."""
    ids = tokens.topk_ids.clamp(min=0) if len(tokens.topk_ids) == 1 else tokens.topk_ids
    return toy.standard(attrs.evolve(tokens, topk_ids=ids), row)


def nothing_to_do(tokens: Any, row: Any) -> Tensor:
    """Gives its input back where no expert has a token."""
    return toy.standard(tokens, row) if (tokens.topk_ids >= 0).any() else tokens.hidden_states


def masked_in_place(tokens: Any, row: Any) -> Tensor:
    tokens.topk_weights.masked_fill_(tokens.topk_ids < 0, 0.0)
    return toy.standard(tokens, row)


def as_if_rows(tokens: Any, row: Any) -> Tensor:
    """Takes the channels of a token to lie side by side."""
    hidden = tokens.hidden_states
    apart = hidden.as_strided(hidden.shape, (hidden.stride(0), 1))
    return toy.standard(attrs.evolve(tokens, hidden_states=apart), row)


def where_positive(tokens: Any, row: Any) -> Tensor:
    """Takes a router weight that is not positive for a slot without expert."""
    ids = torch.where(tokens.topk_weights > 0, tokens.topk_ids, -1)
    return toy.standard(attrs.evolve(tokens, topk_ids=ids), row)


def squeezed(tokens: Any, row: Any) -> Tensor:
    """Loses the weights where they have one column."""
    weights = tokens.topk_weights
    weights = torch.ones_like(weights) if weights.shape[1] == 1 else weights
    return toy.standard(attrs.evolve(tokens, topk_weights=weights), row)


def in_a_byte(tokens: Any, row: Any) -> Tensor:
    """Keeps ids in eight bits."""
    ids = torch.where(tokens.topk_ids < 0, -1, tokens.topk_ids % 256)
    return toy.standard(attrs.evolve(tokens, topk_ids=ids), row)


class Routed:
    """Sorts once for each number of tokens, from a tile on."""

    def __init__(self) -> None:
        self.ids: dict[int, Tensor] = {}

    def standard(self, tokens: Any, row: Any) -> Tensor:
        count = len(tokens.topk_ids)
        ids = tokens.topk_ids if count <= 16 else self.ids.setdefault(count, tokens.topk_ids.clone())
        fits = ids.shape == tokens.topk_ids.shape
        return toy.standard(attrs.evolve(tokens, topk_ids=ids) if fits else tokens, row)


def first_block_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    """Its loop over blocks of channels ends after the first."""
    return toy.expert_row(torch.where(torch.arange(len(x)) < 128, x, 0.0), expert, weights)


def through_fp16(tokens: Any, row: Any) -> Tensor:
    return toy.standard(tokens, lambda x, expert: row(x, expert).half().float())


def dividing_row(x: Tensor, expert: int, weights: Weights) -> Tensor:
    """Divides by its scale, and so by zero for a token of zeros."""
    scale = x.float().abs().amax() / 127.0
    return toy.expert_row((x.float() / scale) * scale, expert, weights)
