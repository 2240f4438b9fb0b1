"""What `moe-core run` computes with a loaded model: greedy text, and how far logits differ."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch


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
