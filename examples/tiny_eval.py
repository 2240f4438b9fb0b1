"""How good the tiny model is: perplexity per byte and how evenly its experts are used.

Letters: B windows, S bytes per window, L layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

WINDOW = 256


class Evaluation(NamedTuple):
    """Figures of one model on one text.

    `losses [B]` float64 holds each window's nats per predicted byte, `expert_shares [L, E]` each expert's share of the
    routed (token, choice) pairs; an even one is 1 / E.
    """

    losses: Tensor
    expert_shares: Tensor

    @property
    def perplexity(self) -> float:
        """Per byte, of all windows."""
        return math.exp(self.losses.mean().item())


def windows(text: bytes) -> Tensor:
    """`text` as int64 `[B, 256]`, windows side by side; an incomplete last one is left out."""
    count = len(text) // WINDOW
    if not count:
        raise ValueError(f"the text has {len(text)} bytes, an evaluation needs at least one window of {WINDOW}")
    return torch.frombuffer(bytearray(text[: count * WINDOW]), dtype=torch.uint8).long().view(count, WINDOW)


def scored_positions(text: bytes) -> list[range]:
    """Positions of `text` that `evaluate` predicts, one range per window: all of a full window but its first byte."""
    return [range(i * WINDOW + 1, (i + 1) * WINDOW) for i in range(len(text) // WINDOW)]


@torch.inference_mode()
def evaluate(model: PreTrainedModel, text: bytes, batch_size: int = 16) -> Evaluation:
    """Run `model` over the windows of `text`, in the dtype its weights have.

    The first byte of a window has nothing before it and is not predicted.

    Args:
        model: a byte-level MoE model whose forward can return router logits.
        text: UTF-8 bytes, at least 256.
        batch_size: windows per forward; changes nothing but speed and memory.
    """
    losses: list[Tensor] = []
    counts = torch.zeros(())
    data = windows(text)
    for start in range(0, len(data), batch_size):
        ids = data[start : start + batch_size]
        output = model(input_ids=ids, output_router_logits=True, use_cache=False)
        logits = output.logits[:, :-1].float().transpose(1, 2)
        losses.append(F.cross_entropy(logits, ids[:, 1:], reduction="none").double().mean(dim=1))
        counts = counts + expert_counts(output.router_logits, model.config.num_experts_per_tok)
    return Evaluation(torch.cat(losses), counts / counts.sum(dim=1, keepdim=True))


def expert_counts(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """How often each expert is chosen: `[L, E]` float32 from L router logits `[tokens, E]`."""
    return torch.stack([_one_hot_choices(logits, top_k).sum(dim=0) for logits in router_logits])


def _one_hot_choices(logits: Tensor, top_k: int) -> Tensor:
    chosen = logits.topk(top_k, dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.float32).scatter_(1, chosen, 1.0)
