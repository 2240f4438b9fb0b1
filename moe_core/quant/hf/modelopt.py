"""`quant_method: modelopt`, and the content of `hf_quant_config.json`: one algorithm, or one per module.

Source: the export module of NVIDIA's Model Optimizer, 0.19 to 0.47.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from moe_core.quant.hf.fields import names_in, refuse_unknown
from moe_core.quant.hf.name_list import is_listed
from moe_core.quant.hf.weight import Weight
from moe_core.quant.known import (
    FP8_BLOCK128,
    FP8_BLOCK128_W8A16,
    FP8_CHANNEL,
    FP8_TENSOR_STATIC,
    MXFP8,
    NVFP4,
    NVFP4_W4A16,
    W8A16_INT8,
)
from moe_core.quant.stored import StoredScheme


@attrs.frozen
class _Algorithm:
    """What a word of `quant_algo` means; `group` is the only group size it has."""

    stored: StoredScheme
    group: int | None = None


_ALGORITHMS = {
    "FP8": _Algorithm(StoredScheme(FP8_TENSOR_STATIC, "scaled")),
    "FP8_PER_CHANNEL_PER_TOKEN": _Algorithm(StoredScheme(FP8_CHANNEL, "scaled")),
    "FP8_BLOCK_SCALES": _Algorithm(StoredScheme(FP8_BLOCK128, "scaled"), 128),
    "FP8_PB_WO": _Algorithm(StoredScheme(FP8_BLOCK128_W8A16, "scaled"), 128),
    "MXFP8": _Algorithm(StoredScheme(MXFP8, "scaled"), 32),
    "NVFP4": _Algorithm(StoredScheme(NVFP4, "modelopt_nvfp4"), 16),
    "W4A16_NVFP4": _Algorithm(StoredScheme(NVFP4_W4A16, "modelopt_nvfp4"), 16),
    "W8A16": _Algorithm(StoredScheme(W8A16_INT8, "scaled")),
}
_NONE = ("UNQUANTIZED", "NONE", "")
_MIXED = "MIXED_PRECISION"

_LISTS = ("exclude_modules", "ignore", "modules_to_not_convert")
_USED = (
    "quant_method",
    "quant_algo",
    "group_size",
    "quantized_layers",
    *_LISTS,
    "has_zero_point",
    "pre_quant_scale",
)
#: The KV cache, who wrote it, names of modules that a loader fuses, and what says `quant_algo` or `quantized_layers`
#: again in another layout (its group sizes are compared).
_HARMLESS = (
    "config_groups",
    "input_activations",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "modelopt_version",
    "packed_modules_mapping",
    "producer",
    "weights",
)


def read_modelopt(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    """The scheme of `quant_algo`, of the weight's entry in `quantized_layers`, or none for excluded modules."""
    if isinstance(config.get("quantization"), Mapping):
        refuse_unknown(config, weight, ("quant_method", "quantization"), ("producer",))
        config = config["quantization"]
    refuse_unknown(config, weight, _USED, _HARMLESS)
    if is_listed(weight, names_in(config, *_LISTS, weight=weight)):
        return weight.unquantized()
    if str(config.get("quant_algo")).upper() != _MIXED:
        return _read_algorithm(config, weight)
    layers = config.get("quantized_layers")
    if not isinstance(layers, Mapping):
        raise weight.error(f"expected {_MIXED} to come with quantized_layers, got {layers!r}")
    layer = weight.entry(layers)
    return weight.unquantized() if layer is None else _read_algorithm(layer, weight)


def _read_algorithm(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    refuse_unknown(config, weight, _USED, _HARMLESS)
    word = str(config.get("quant_algo") or "").upper()
    if word in _NONE:
        return weight.unquantized()
    for field in ("pre_quant_scale", "has_zero_point"):
        if config.get(field):
            raise weight.error(f"quant_algo {word} with {field} is not read: its factors are not part of any scheme")
    if word not in _ALGORITHMS:
        known = ", ".join((*_ALGORITHMS, _MIXED))
        raise weight.error(f"quant_algo {config['quant_algo']!r} is not read; known: {known}")
    algorithm = _ALGORITHMS[word]
    for group in _group_sizes(config):
        if algorithm.group is not None and group not in (None, 0, algorithm.group):
            raise weight.error(f"quant_algo {word} has group_size {algorithm.group}, got {group!r}")
    return algorithm.stored


def _group_sizes(config: Mapping[str, Any]) -> Iterable[Any]:
    """Every place that tells the group size of weights."""
    yield config.get("group_size")
    for group in (config, *(config.get("config_groups") or {}).values()):
        yield (group.get("weights") or {}).get("group_size")
