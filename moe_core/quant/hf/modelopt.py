"""`quant_method: modelopt`, and the content of `hf_quant_config.json`: one algorithm, or one per module.

Source: the export module of NVIDIA's Model Optimizer, 0.19 to 0.47.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from moe_core.quant.hf.fields import look_up, names_in, refuse_unknown, table, tables, text, whole_number
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
_NONE = ("UNQUANTIZED", "NONE")
_MIXED = "MIXED_PRECISION"
#: Methods that name the weights they are about.
_METHOD_DTYPES = {"modelopt_fp4": "fp4", "modelopt_fp8": "fp8"}
#: What the arguments of a group say about numbers of a dtype.
_NUMBERS: dict[str, dict[str, Any]] = {
    "fp8": {"type": "float", "num_bits": 8},
    "fp4": {"type": "float", "num_bits": 4},
    "int8": {"type": "int", "num_bits": 8},
}

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
    methods = {text(config, "quant_method", weight)}
    if config.get("quantization") is not None:
        refuse_unknown(config, weight, ("quant_method", "quantization"), ("producer",))
        config = table(config, "quantization", weight) or {}
        methods.add(text(config, "quant_method", weight))
    refuse_unknown(config, weight, _USED, _HARMLESS)
    word, layers = _word(config, weight), table(config, "quantized_layers", weight)
    for method in methods:
        if not _is_of_method(word, method):
            raise weight.error(f"quant_method {method} and quant_algo {word} contradict each other")
    if word != _MIXED and layers:
        raise weight.error(f"quant_algo {word} and quantized_layers contradict each other; {_MIXED} has them")
    if word == _MIXED and not layers:
        raise weight.error(f"expected {_MIXED} to come with quantized_layers, got {config.get('quantized_layers')!r}")
    if is_listed(weight, names_in(config, *_LISTS, weight=weight)):
        return weight.unquantized()
    if word != _MIXED:
        return _read_algorithm(config, weight)
    layer = weight.entry(layers or {})
    return weight.unquantized() if layer is None else _read_algorithm(layer, weight)


def _read_algorithm(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    refuse_unknown(config, weight, _USED, _HARMLESS)
    word = _word(config, weight)
    if word in _NONE:
        _compare(config, word, _Algorithm(weight.unquantized()), weight)
        return weight.unquantized()
    for field in ("pre_quant_scale", "has_zero_point"):
        if look_up(config, field, {None: False, False: False, True: True}, weight):
            raise weight.error(f"quant_algo {word} with {field} is not read: its factors are not part of any scheme")
    if word not in _ALGORITHMS:
        known = ", ".join((*_ALGORITHMS, _MIXED))
        raise weight.error(f"quant_algo {config['quant_algo']!r} is not read; known: {known}")
    algorithm = _ALGORITHMS[word]
    _compare(config, word, algorithm, weight)
    return algorithm.stored


def _word(config: Mapping[str, Any], weight: Weight) -> str:
    """The algorithm; a configuration without one may quantize after all, so it has to say `NONE`."""
    word = text(config, "quant_algo", weight)
    if word is None:
        raise weight.error(f"expected quant_algo, got none; known: {', '.join((*_ALGORITHMS, _MIXED, *_NONE))}")
    return word.upper()


def _is_of_method(word: str, method: str | None) -> bool:
    """Whether a method that names its weights is about those of the algorithm."""
    if method == "modelopt_mixed" or word == _MIXED:
        return word == _MIXED and method in (None, "modelopt", "modelopt_mixed")
    dtype = _METHOD_DTYPES.get(method or "")
    return dtype is None or word not in _ALGORITHMS or _ALGORITHMS[word].stored.scheme.weight_dtype == dtype


def _compare(config: Mapping[str, Any], word: str, algorithm: _Algorithm, weight: Weight) -> None:
    """Raise `SpecError` where groups with arguments, which say the same in another layout, say something else."""
    scheme = algorithm.stored.scheme
    _compare_group_size(config, word, algorithm, weight)
    for name, group in {"": config, **tables(config, "config_groups", weight, "groups of arguments")}.items():
        for field, dtype in (("weights", scheme.weight_dtype), ("input_activations", scheme.activation_dtype)):
            arguments = table(group, field, weight)
            if not arguments:
                continue
            kind, bits = text(arguments, "type", weight), arguments.get("num_bits")
            said = {"type": kind, "num_bits": None if bits is None else whole_number(arguments, "num_bits", weight)}
            if dtype not in _NUMBERS or any(said[key] not in (None, meant) for key, meant in _NUMBERS[dtype].items()):
                place = f"config_groups {name} {field}".removeprefix("config_groups  ")
                raise weight.error(f"quant_algo {word} and {place} of {bits} bits, {kind}, contradict each other")
            if field == "weights":
                _compare_group_size(arguments, word, algorithm, weight)


def _compare_group_size(config: Mapping[str, Any], word: str, algorithm: _Algorithm, weight: Weight) -> None:
    size = None if config.get("group_size") is None else whole_number(config, "group_size", weight)
    if algorithm.group is not None and size not in (None, 0, algorithm.group):
        raise weight.error(f"quant_algo {word} has group_size {algorithm.group}, got {size!r}")
