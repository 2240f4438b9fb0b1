"""NVFP4 as NVIDIA Model Optimizer exports it for Hugging Face, and vLLM, SGLang and TensorRT-LLM read it.

Per projection `weight` uint8 `[N, K / 2]`, `weight_scale` e4m3 `[N, K / 16]`, and the fp32 scalars `weight_scale_2` and
`input_scale` (calibrated amax / 2688), which multiply. The configuration stands twice, as its exporter writes it: in
`config.json` and in `hf_quant_config.json`. Its `producer` is moe-core; a reader that insists on another one refuses.
"""

from __future__ import annotations

import importlib.metadata

import torch

from moe_core.payloads import Tensor
from moe_core.quant import NVFP4
from moe_core.quantizer.layout import Contents, Description, Expert, Layout
from moe_core.quantizer.nvfp4 import pack_nvfp4
from moe_core.quantizer.rounding import NVFP4_GROUP, nvfp4_global_scale
from moe_core.quantizer.words import stored_for


def _store(expert: Expert) -> dict[str, dict[str, Tensor]]:
    return {
        half: {
            "weight": packed.weight,
            "weight_scale": packed.scale,
            "weight_scale_2": packed.global_scale,
            "input_scale": nvfp4_global_scale(torch.tensor(expert.input_amax[half], dtype=torch.float64)),
        }
        for half, packed in pack_nvfp4(expert, divides=False).items()
    }


def _describe(contents: Contents) -> Description:
    producer = {"name": "moe-core", "version": importlib.metadata.version("moe-core")}
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP}
    kept = list(contents.kept_modules)
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": NVFP4_GROUP,
        "exclude_modules": kept,
    }
    return Description(
        quantization_config={
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers, "input_activations": numbers}},
            "ignore": kept,
            "producer": producer,
        },
        files={"hf_quant_config.json": {"producer": producer, "quantization": quantization}},
    )


LAYOUTS = (
    Layout(
        stored=stored_for("modelopt", NVFP4),
        store=_store,
        describe=_describe,
        column_multiple=NVFP4_GROUP,
        static_inputs=True,
    ),
)
