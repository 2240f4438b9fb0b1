"""Quantization schemes: their values, their names, and how checkpoints spell and store them."""

from __future__ import annotations

from moe_core.quant.known import (
    BF16,
    FP8_BLOCK128,
    FP8_BLOCK128_UE8M0,
    FP16,
    FP32,
    MXFP4_W4A16,
    MXFP8,
    NVFP4,
    NVFP4_W4A16,
    SCHEMES,
    W4A4_INT4,
    W4A8_INT8,
    W8A8_INT8,
)
from moe_core.quant.layer import LayerQuant
from moe_core.quant.scheme import ACTIVATION_DTYPES, ACTIVATION_SCALING, SCALE_DTYPES, WEIGHT_DTYPES, WHOLE, QuantScheme
from moe_core.quant.stored import STORAGES, StoredLayer, StoredScheme

__all__ = [
    "ACTIVATION_DTYPES",
    "ACTIVATION_SCALING",
    "BF16",
    "FP8_BLOCK128",
    "FP8_BLOCK128_UE8M0",
    "FP16",
    "FP32",
    "MXFP4_W4A16",
    "MXFP8",
    "NVFP4",
    "NVFP4_W4A16",
    "SCALE_DTYPES",
    "SCHEMES",
    "STORAGES",
    "W4A4_INT4",
    "W4A8_INT8",
    "W8A8_INT8",
    "WEIGHT_DTYPES",
    "WHOLE",
    "LayerQuant",
    "QuantScheme",
    "StoredLayer",
    "StoredScheme",
]
