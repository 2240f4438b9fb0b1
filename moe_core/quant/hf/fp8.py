"""`quant_method: fp8` and `mxfp8`: the layout of transformers and of many releases (DeepSeek, Qwen, MiniMax)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.quant.hf.fields import look_up, names_in, refuse_unknown
from moe_core.quant.hf.name_list import is_listed
from moe_core.quant.hf.quark_export import check_export
from moe_core.quant.hf.weight import Weight
from moe_core.quant.known import MXFP8
from moe_core.quant.scheme import PER_TENSOR, WHOLE
from moe_core.quant.stored import StoredScheme

_USED = (
    "quant_method",
    "activation_scheme",
    "weight_block_size",
    "modules_to_not_convert",
    "ignored_layers",
    "fmt",
    "scale_fmt",
    "expert_dtype",
    "export",
)
#: What happens on loading, to other modules, or to the KV cache.
_HARMLESS = (
    "dequantize",
    "is_checkpoint_fp8_serialized",
    "is_checkpoint_mxfp8_serialized",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "modules_to_convert",
)
_SCALES = {None: "fp32", "float": "fp32", "ue8m0": "e8m0"}


def read_fp8(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    """Blocks of `weight_block_size` with an activation scale per token and block width, or whole tensors without it.

    Dynamic activations of whole tensors have a scale per token, as in transformers; static ones one scale. Experts may
    be packed e2m1 with scales per 32 instead (`expert_dtype: fp4`). Where AMD's Quark wrote the checkpoint, activations
    are left alone without `activation_scheme`.
    """
    if _leaves_alone(config, weight):
        return weight.unquantized()
    block = _block(config, weight)
    scale = look_up(config, "scale_fmt", _SCALES, weight)
    fp8 = {"activation_dtype": "fp8", "activation_scale": scale}
    dynamic = {**fp8, "activation_scaling": "dynamic", "activation_group": block[1]}
    static = {**fp8, "activation_scaling": "static", "activation_group": PER_TENSOR}
    absent: dict[str, Any] = {} if check_export(config, weight) else dynamic
    fields = look_up(config, "activation_scheme", {None: absent, "dynamic": dynamic, "static": static}, weight)
    experts = look_up(config, "expert_dtype", {None: "fp8", "fp8": "fp8", "fp4": "fp4"}, weight)
    if experts == "fp4":
        packed = weight.scheme(weight_dtype="fp4", weight_block=(1, 32), weight_scale=scale, **fields)
        return StoredScheme(packed, "packed_fp4")
    return StoredScheme(weight.scheme(weight_dtype="fp8", weight_block=block, weight_scale=scale, **fields), "scaled")


def read_mxfp8(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    """Blocks of 1 x 32 with exponent scales, for weights and activations."""
    if _leaves_alone(config, weight):
        return weight.unquantized()
    if config.get("weight_block_size") is not None and _block(config, weight) != (1, 32):
        raise weight.error(f"mxfp8 has weight_block_size [1, 32], got {config['weight_block_size']!r}")
    look_up(config, "scale_fmt", {None: "e8m0", "ue8m0": "e8m0"}, weight)
    look_up(config, "activation_scheme", {None: "dynamic", "dynamic": "dynamic"}, weight)
    look_up(config, "expert_dtype", {None: "fp8", "fp8": "fp8"}, weight)
    look_up(config, "export", {None: None}, weight)
    return StoredScheme(MXFP8, "scaled")


def _leaves_alone(config: Mapping[str, Any], weight: Weight) -> bool:
    refuse_unknown(config, weight, _USED, _HARMLESS)
    look_up(config, "fmt", dict.fromkeys((None, "e4m3", "float8_e4m3fn")), weight)
    return is_listed(weight, names_in(config, "modules_to_not_convert", "ignored_layers", weight=weight))


def _block(config: Mapping[str, Any], weight: Weight) -> tuple[int, int]:
    block = config.get("weight_block_size")
    if block is None:
        return (WHOLE, WHOLE)
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise weight.error(f"expected weight_block_size to be two whole numbers, got {block!r}")
    return (block[0], block[1])
