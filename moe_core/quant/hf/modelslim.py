"""The content of `quant_model_description.json` (Ascend ModelSlim): a word for every tensor of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.quant.hf.fields import look_up, refuse_unknown, whole_number
from moe_core.quant.hf.weight import Weight
from moe_core.quant.known import MXFP4, MXFP4_W4A8, MXFP8, W4A4_INT4, W4A8_INT8, W8A8_INT8
from moe_core.quant.stored import StoredScheme

_WORDS = {
    "W8A8_DYNAMIC": StoredScheme(W8A8_INT8, "modelslim_w8a8"),
    "W4A8_DYNAMIC": StoredScheme(W4A8_INT8, "modelslim_w4a8"),
    "W4A4_DYNAMIC": StoredScheme(W4A4_INT4, "modelslim_w4a4"),
    "W8A8_MXFP8": StoredScheme(MXFP8, "scaled"),
    "W4A8_MXFP": StoredScheme(MXFP4_W4A8, "packed_fp4"),
    "W4A4_MXFP4": StoredScheme(MXFP4, "packed_fp4"),
}
_UNQUANTIZED = "FLOAT"
_TENSOR_WORDS = (_UNQUANTIZED, *_WORDS)
_USED = ("quant_method", "version", "group_size")
#: The main word, the KV cache and attention, communication, and how the weights were rotated before (they are stored
#: rotated, and the layer before was rotated with them).
_HARMLESS = (
    "model_quant_type",
    "kv_quant_type",
    "kv_cache_type",
    "fa_quant_type",
    "reduce_quant_type",
    "metadata",
    "optional",
    "packed_modules_mapping",
)


def is_description(config: Mapping[str, Any]) -> bool:
    """Whether a configuration without a method is such a description."""
    return "model_quant_type" in config or any(word in _TENSOR_WORDS for word in config.values())


def read_modelslim(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    """The scheme of the word that all experts' weights have.

    Raises:
        SpecError: Also where the description does not mention the weights: nothing is quantized by default.
    """
    # Most of some hundred thousand names are tensors, and every weight asks.
    header = {name: config[name] for name in [name for name in config if "." not in str(name)]}
    tensors = [name for name, word in header.items() if word in _TENSOR_WORDS]
    refuse_unknown(header, weight, _USED, (*_HARMLESS, *tensors))
    word = weight.entry(config, ".weight")
    if word is None:
        raise weight.error("the description names no such weight; add its tensors, as FLOAT if they are not quantized")
    if word == _UNQUANTIZED:
        return weight.unquantized()
    stored = look_up({"word": word}, "word", _WORDS, weight)
    if word == "W4A8_DYNAMIC":
        look_up(config, "version", dict.fromkeys((None, "1.0.0")), weight)
        if config.get("group_size") is not None and whole_number(config, "group_size", weight) != 0:
            raise weight.error(f"W4A8_DYNAMIC in groups of {config['group_size']} is not read; per channel is")
    return stored
