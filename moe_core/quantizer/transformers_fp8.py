"""fp8 in tiles as DeepSeek-V3 publishes it and transformers (`FineGrainedFP8Config`), vLLM and SGLang read it.

Per projection `weight` e4m3 `[N, K]` and `weight_scale_inv` fp32 `[N / 128, K / 128]`, rounded up; in spite of its name
it multiplies. Tiles at an edge may be smaller; loaders that cut tiles over ranks want multiples of 128.
"""

from __future__ import annotations

from moe_core.payloads import Tensor
from moe_core.quant import FP8_BLOCK128
from moe_core.quantizer.layout import Contents, Description, Layout, each_projection
from moe_core.quantizer.rounding import quantize_fp8_tiles
from moe_core.quantizer.words import stored_for

_TILE = (128, 128)


def _store(half: str, weight: Tensor) -> dict[str, Tensor]:
    quantized = quantize_fp8_tiles(weight, *_TILE)
    return {"weight": quantized.codes, "weight_scale_inv": quantized.scale}


def _describe(contents: Contents) -> Description:
    return Description(
        quantization_config={
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": list(_TILE),
            "modules_to_not_convert": list(contents.kept_modules),
        }
    )


LAYOUTS = (Layout(stored=stored_for("transformers", FP8_BLOCK128), store=each_projection(_store), describe=_describe),)
