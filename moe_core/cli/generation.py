"""What `moe-core run` computes with a loaded model: greedy text, perplexity, and how far logits differ.

Letters: S tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from moe_core.errors import SpecError


@attrs.frozen(kw_only=True)
class Generated:
    """Greedily generated tokens and the time they took.

    Attributes:
        ids: New token ids, without the prompt.
        prefill_tokens: Tokens of the prompt.
        prefill_seconds: Time of the forward over the prompt.
        decode_seconds: Time of the forwards for all new tokens but the first, which comes from the prefill.
    """

    ids: tuple[int, ...]
    prefill_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prefill_tokens / self.prefill_seconds

    @property
    def decode_rate(self) -> float | None:
        """New tokens per second, None if none was decoded."""
        return (len(self.ids) - 1) / self.decode_seconds if len(self.ids) > 1 else None


@attrs.frozen(kw_only=True)
class Perplexity:
    """How well a model predicts a text: both are 1 for perfect prediction."""

    per_token: float
    per_byte: float
    predicted_tokens: int


@torch.inference_mode()
def prompt_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits `[S, V]` of one forward over a prompt, fp32 on the CPU."""
    logits: torch.Tensor = model(input_ids=_batch(model, ids), use_cache=False).logits
    return logits[0].float().cpu()


@torch.inference_mode()
def generate(model: Any, ids: Sequence[int], max_new_tokens: int) -> Generated:
    """Continue `ids` greedily with a key-value cache, until `max_new_tokens` or an end token of the model."""
    ends = _end_ids(model)
    start = _now(model)
    output = model(input_ids=_batch(model, ids), use_cache=True)
    new = [int(output.logits[0, -1].argmax())]
    prefilled = _now(model)
    while len(new) < max_new_tokens and new[-1] not in ends:
        # The name of the cache depends on the version of transformers; what one call returns the next one takes.
        name = "cache" if "cache" in output else "past_key_values"
        output = model(input_ids=_batch(model, new[-1:]), use_cache=True, **{name: output[name]})
        new.append(int(output.logits[0, -1].argmax()))
    return Generated(
        ids=tuple(new),
        prefill_tokens=len(ids),
        prefill_seconds=prefilled - start,
        decode_seconds=_now(model) - prefilled,
    )


@torch.inference_mode()
def perplexity(model: Any, ids: Sequence[int], num_bytes: int, window: int) -> Perplexity:
    """Perplexity of a text, read in windows side by side; the first token of each is not predicted.

    Args:
        model: A causal language model.
        ids: The text's token ids.
        num_bytes: The text's length in bytes, for the figure per byte.
        window: Tokens per window; an incomplete last one counts too.

    Raises:
        SpecError: There is nothing to predict.
    """
    total, predicted = 0.0, 0
    for start in range(0, len(ids), window):
        piece = _batch(model, ids[start : start + window])
        if piece.shape[1] > 1:
            logits = model(input_ids=piece, use_cache=False).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
            predicted += piece.shape[1] - 1
    if not predicted:
        raise SpecError(f"the text has {len(ids)} tokens, perplexity needs at least 2")
    # Bits of unpredicted first tokens are in neither figure: the bytes are scaled to the predicted share.
    return Perplexity(
        per_token=math.exp(total / predicted),
        per_byte=math.exp(total / (num_bytes * predicted / len(ids))),
        predicted_tokens=predicted,
    )


def difference(logits: torch.Tensor, reference: torch.Tensor) -> tuple[float, float, int]:
    """Largest absolute difference, largest magnitude of the reference, and positions with the same top id."""
    same = int((logits.argmax(-1) == reference.argmax(-1)).sum())
    return float((logits - reference).abs().max()), float(reference.abs().max()), same


def _batch(model: Any, ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(ids)], dtype=torch.long, device=model.device)


def _end_ids(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset(() if ends is None else ends if isinstance(ends, list) else [ends])


def _now(model: Any) -> float:
    """The time when everything queued on the model's device is done."""
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)
    return time.perf_counter()
