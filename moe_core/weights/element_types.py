"""The words of `QuantScheme` as torch dtypes: what canonical tensors have, and what checkpoints may have for it."""

from __future__ import annotations

import torch

from moe_core.payloads import TORCH_DTYPES
from moe_core.quant import WEIGHT_BITS

_FLOATS = tuple(TORCH_DTYPES.values())
#: Where several values share a byte, its sign says nothing.
_BYTES = (torch.uint8, torch.int8)

#: Word of a weight's elements -> dtype of the canonical tensor; 4-bit elements are packed two to a byte.
WEIGHTS = {**TORCH_DTYPES, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8, "fp4": torch.uint8}
#: The same for checkpoints: dtypes that mean these elements.
STORED_WEIGHTS = {word: _BYTES if WEIGHT_BITS[word] == 4 else (dtype,) for word, dtype in WEIGHTS.items()}

#: Word of a scale's elements -> dtypes that the canonical tensor may have, the usual one first.
SCALES = {
    "fp32": (torch.float32,),
    "bf16": (torch.bfloat16,),
    "e4m3": (torch.float8_e4m3fn,),
    "e8m0": (torch.uint8, torch.float8_e8m0fnu),
}
#: The same for checkpoints: a conversion between these is exact, or checked value by value.
STORED_SCALES = {**SCALES, "fp32": (*_FLOATS, torch.float8_e8m0fnu), "e8m0": (*SCALES["e8m0"], *_FLOATS)}
