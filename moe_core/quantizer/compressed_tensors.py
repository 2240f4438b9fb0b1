"""The layouts of the compressed-tensors library, which llm-compressor writes and transformers, vLLM and SGLang read.

- `w8a8_int8` as `int-quantized`: `weight` int8 `[N, K]`, `weight_scale` fp32 `[N, 1]`.
- `nvfp4` as `nvfp4-pack-quantized`: `weight_packed` uint8 `[N, K / 2]`, `weight_scale` e4m3 `[N, K / 16]`, and fp32
  `weight_global_scale [1]` and `input_global_scale [1]`, which divide.
- `mxfp4_w4a16` as `mxfp4-pack-quantized`: `weight_packed` uint8 `[N, K / 2]`, `weight_scale` exponent bytes
  `[N, K / 32]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_core.payloads import Tensor
from moe_core.quant import MXFP4_W4A16, NVFP4, W8A8_INT8
from moe_core.quantizer.layout import Contents, Description, Expert, Layout, each_projection
from moe_core.quantizer.nvfp4 import nvfp4_divisor, pack_nvfp4
from moe_core.quantizer.rounding import MX_GROUP, NVFP4_GROUP, quantize_int, quantize_mxfp4
from moe_core.quantizer.words import stored_for
from moe_core.weights.codes import pack


def _store_int8(half: str, weight: Tensor) -> dict[str, Tensor]:
    quantized = quantize_int(weight, 8)
    return {"weight": quantized.codes, "weight_scale": quantized.scale}


def _store_mxfp4(half: str, weight: Tensor) -> dict[str, Tensor]:
    quantized = quantize_mxfp4(weight)
    return {"weight_packed": pack(quantized.codes, axis=1), "weight_scale": quantized.scale}


def _store_nvfp4(expert: Expert) -> dict[str, dict[str, Tensor]]:
    return {
        half: {
            "weight_packed": packed.weight,
            "weight_scale": packed.scale,
            "weight_global_scale": packed.global_scale.reshape(1),
            "input_global_scale": nvfp4_divisor(torch.tensor([expert.input_amax[half]])),
        }
        for half, packed in pack_nvfp4(expert, divides=True).items()
    }


def _numbers(bits: int, kind: str, strategy: str, *, dynamic: bool | str = False, **more: Any) -> dict[str, Any]:
    """The library's `QuantizationArgs`."""
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}


def _describes(word: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Callable[[Contents], Description]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}

    def describe(contents: Contents) -> Description:
        return Description(
            quantization_config={
                "quant_method": "compressed-tensors",
                "format": word,
                "quantization_status": "compressed",
                "config_groups": {"group_0": {**group, "format": word}},
                "ignore": list(contents.kept_modules),
                "kv_cache_scheme": None,
                "global_compression_ratio": None,
            }
        )

    return describe


_INT8_WEIGHTS = _numbers(8, "int", "channel")
_INT8_INPUTS = _numbers(8, "int", "token", dynamic=True)
_NVFP4: dict[str, Any] = {"group_size": NVFP4_GROUP, "scale_dtype": "torch.float8_e4m3fn"}
_NVFP4_WEIGHTS = _numbers(4, "float", "tensor_group", **_NVFP4)
#: The global scale is the checkpoint's, those of the groups come from the data.
_NVFP4_INPUTS = _numbers(4, "float", "tensor_group", dynamic="local", **_NVFP4)
_MXFP4_WEIGHTS = _numbers(4, "float", "group", group_size=MX_GROUP, scale_dtype="torch.uint8")

LAYOUTS = (
    Layout(
        stored=stored_for("compressed_tensors", W8A8_INT8),
        store=each_projection(_store_int8),
        describe=_describes("int-quantized", _INT8_WEIGHTS, _INT8_INPUTS),
    ),
    Layout(
        stored=stored_for("compressed_tensors", NVFP4),
        store=_store_nvfp4,
        describe=_describes("nvfp4-pack-quantized", _NVFP4_WEIGHTS, _NVFP4_INPUTS),
        column_multiple=NVFP4_GROUP,
        static_inputs=True,
    ),
    Layout(
        stored=stored_for("compressed_tensors", MXFP4_W4A16),
        store=each_projection(_store_mxfp4),
        describe=_describes("mxfp4-pack-quantized", _MXFP4_WEIGHTS, None),
        column_multiple=MX_GROUP,
    ),
)
