"""A small model configuration, and what is read from it."""

from __future__ import annotations

from typing import Any

from moe_core.model_config import LayerGroup, layer_groups
from moe_core.request import LayerRequest

BASE: dict[str, Any] = {
    "model_type": "some_moe",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def changed(**changes: Any) -> dict[str, Any]:
    """`BASE` with other values; `removed` takes a key away."""
    config = {**BASE, **changes}
    return {name: value for name, value in config.items() if value != "removed"}


def only_request(config: dict[str, Any], **more: Any) -> LayerRequest:
    """What all layers ask for."""
    (group,) = layer_groups(config, **more)
    return group.request


def schemes(groups: tuple[LayerGroup, ...]) -> dict[tuple[int, ...], str]:
    """Layers -> the name of their scheme."""
    return {group.layers: str(group.request.quant) for group in groups}
