"""The layouts of MindStudio ModelSlim, which vLLM-Ascend and SGLang read on Ascend devices.

Per projection `weight`, `weight_scale` fp32 `[N, 1]` and `weight_offset` (zeros, since codes are symmetric):

- `w8a8_int8`: `weight` int8 `[N, K]`.
- `w4a8_int8`: `weight` int8 `[N / 2, K]`, outputs 2j and 2j + 1 in the low and high nibble; `scale_bias` fp32, which
  kernels that split int8 activations into nibbles add: 8 * scale * sum of the codes over the inputs, `[N, 1]`, and for
  the down projection in 16 partial sums along the inputs, `[N, 16]`.
- `w4a4_int4`: `weight` int8 `[N, K]`, one four-bit value per byte.

`quant_model_description.json` names the type of every tensor; `config.json` says nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_core.payloads import Tensor
from moe_core.quant import W4A4_INT4, W4A8_INT8, W8A8_INT8
from moe_core.quantizer.layout import Contents, Description, Layout, each_projection
from moe_core.quantizer.rounding import Quantized, quantize_int
from moe_core.quantizer.words import stored_for
from moe_core.weights.codes import pack

#: Partial sums of `scale_bias` of the down projection: a rank of up to so many takes its own.
_PARTIAL_SUMS = 16


def _with_scale(weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    return {"weight": weight, "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}


def _store_w8a8(half: str, weight: Tensor) -> dict[str, Tensor]:
    quantized = quantize_int(weight, 8)
    return _with_scale(quantized.codes, quantized.scale)


def _store_w4a8(half: str, weight: Tensor) -> dict[str, Tensor]:
    quantized = quantize_int(weight, 4)
    stored = _with_scale(pack(quantized.codes, axis=0), quantized.scale)
    return stored | {"scale_bias": _scale_bias(quantized, _PARTIAL_SUMS if half == "down" else 1)}


def _scale_bias(quantized: Quantized, parts: int) -> Tensor:
    sums = quantized.codes.reshape(len(quantized.codes), parts, -1).sum(-1, dtype=torch.float64)
    return (8 * sums * quantized.scale.double()).float()


def _store_w4a4(half: str, weight: Tensor) -> dict[str, Tensor]:
    quantized = quantize_int(weight, 4)
    return _with_scale(quantized.codes, quantized.scale)


def _describes(word: str) -> Callable[[Contents], Description]:
    def describe(contents: Contents) -> Description:
        types = {name: "FLOAT" for name in contents.kept} | {name: word for name in contents.quantized}
        about = {"version": "1.0.0", "model_quant_type": word, "metadata": {}, "group_size": 0, "optional": {}}
        return Description(files={"quant_model_description.json": {**dict(sorted(types.items())), **about}})

    return describe


LAYOUTS = (
    Layout(
        stored=stored_for("modelslim", W8A8_INT8),
        store=each_projection(_store_w8a8),
        describe=_describes("W8A8_DYNAMIC"),
        file_stem="quant_model_weights",
    ),
    Layout(
        stored=stored_for("modelslim", W4A8_INT8),
        store=each_projection(_store_w4a8),
        describe=_describes("W4A8_DYNAMIC"),
        row_multiple=2,
        down_column_multiple=_PARTIAL_SUMS,
        file_stem="quant_model_weights",
    ),
    Layout(
        stored=stored_for("modelslim", W4A4_INT4),
        store=each_projection(_store_w4a4),
        describe=_describes("W4A4_DYNAMIC"),
        file_stem="quant_model_weights",
    ),
)
