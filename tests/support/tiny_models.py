"""Tiny random MoE models of bytes, as transformers saves them, without a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def write_tiny_qwen(folder: Path, **changes: Any) -> None:
    """Save a `tiny_qwen`."""
    tiny_qwen(**changes).save_pretrained(folder)


def tiny_qwen(**changes: Any) -> Any:
    """A Qwen3-MoE model with weights from a fixed seed in fp32, or in the `dtype` of `changes`.

    Args:
        changes: Fields of its configuration that differ.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    fields = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "dtype": "float32",
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = Qwen3MoeConfig(**{**fields, **changes})
    return Qwen3MoeForCausalLM(config).to(config.dtype)
