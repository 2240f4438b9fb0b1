"""The schemes that have names.

Formats: OCP Microscaling (MX) v1.0 for e2m1/e4m3/e8m0 with blocks of 32; block scales of 128 x 128 as in the
DeepSeek-V3 checkpoints; NVFP4 as e2m1 with e4m3 scales per 16 and one fp32 global scale.
"""

from __future__ import annotations

from typing import Any

import attrs

from moe_core.quant.scheme import PER_TENSOR, WHOLE, QuantScheme


def _weight_only(weight_dtype: str, block: tuple[int, int], scale: str, **more: Any) -> QuantScheme:
    return QuantScheme(weight_dtype=weight_dtype, weight_block=block, weight_scale=scale, **more)


def _dynamic(weight: QuantScheme, dtype: str, group: int = WHOLE, scale: str = "fp32") -> QuantScheme:
    return attrs.evolve(
        weight, activation_dtype=dtype, activation_scaling="dynamic", activation_group=group, activation_scale=scale
    )


def _static(weight: QuantScheme, dtype: str, group: int, scale: str) -> QuantScheme:
    return attrs.evolve(_dynamic(weight, dtype, group, scale), activation_scaling="static")


FP32 = QuantScheme(weight_dtype="fp32")
BF16 = QuantScheme(weight_dtype="bf16")
FP16 = QuantScheme(weight_dtype="fp16")

# fp8 weights: W8A16 where activations are left alone.
FP8_BLOCK128_W8A16 = _weight_only("fp8", (128, 128), "fp32")
FP8_BLOCK128 = _dynamic(FP8_BLOCK128_W8A16, "fp8", 128)
FP8_BLOCK128_UE8M0 = _dynamic(_weight_only("fp8", (128, 128), "e8m0"), "fp8", 128, "e8m0")
FP8_TENSOR_W8A16 = _weight_only("fp8", (WHOLE, WHOLE), "fp32")
FP8_TENSOR = _dynamic(FP8_TENSOR_W8A16, "fp8")
FP8_TENSOR_STATIC = _static(FP8_TENSOR_W8A16, "fp8", PER_TENSOR, "fp32")
FP8_CHANNEL_W8A16 = _weight_only("fp8", (1, WHOLE), "fp32")
FP8_CHANNEL = _dynamic(FP8_CHANNEL_W8A16, "fp8")
MXFP8_W8A16 = _weight_only("fp8", (1, 32), "e8m0")
MXFP8 = _dynamic(MXFP8_W8A16, "fp8", 32, "e8m0")

# Integer weights; per output channel unless a group is named.
W8A16_INT8 = _weight_only("int8", (1, WHOLE), "fp32")
W8A16_INT8_G128 = _weight_only("int8", (1, 128), "fp32")
W8A8_INT8 = _dynamic(W8A16_INT8, "int8")
W4A16_INT4 = _weight_only("int4", (1, WHOLE), "fp32")
W4A16_INT4_G32 = _weight_only("int4", (1, 32), "fp32")
W4A16_INT4_G64 = _weight_only("int4", (1, 64), "fp32")
W4A16_INT4_G128 = _weight_only("int4", (1, 128), "fp32")
W4A16_INT4_ASYM_G128 = attrs.evolve(W4A16_INT4_G128, zero_point=True)
W4A8_INT8 = _dynamic(W4A16_INT4, "int8")
W4A8_INT8_G128 = _dynamic(W4A16_INT4_G128, "int8")
W4A8_FP8_G128 = _dynamic(W4A16_INT4_G128, "fp8")
W4A4_INT4 = _dynamic(W4A16_INT4, "int4")

# fp4 weights.
MXFP4_W4A16 = _weight_only("fp4", (1, 32), "e8m0")
MXFP4 = _dynamic(MXFP4_W4A16, "fp4", 32, "e8m0")
MXFP4_W4A8 = _dynamic(MXFP4_W4A16, "fp8", 32, "e8m0")
MXFP4_W4A8_G128 = _dynamic(MXFP4_W4A16, "fp8", 128, "e8m0")
NVFP4_W4A16 = _weight_only("fp4", (1, 16), "e4m3", global_scale=True)
NVFP4 = _static(NVFP4_W4A16, "fp4", 16, "e4m3")

#: Names by which the command line and the decisions call a scheme.
SCHEMES: dict[str, QuantScheme] = {
    "fp32": FP32,
    "bf16": BF16,
    "fp16": FP16,
    "fp8_block128": FP8_BLOCK128,
    "fp8_block128_ue8m0": FP8_BLOCK128_UE8M0,
    "fp8_block128_w8a16": FP8_BLOCK128_W8A16,
    "fp8_tensor": FP8_TENSOR,
    "fp8_tensor_static": FP8_TENSOR_STATIC,
    "fp8_tensor_w8a16": FP8_TENSOR_W8A16,
    "fp8_channel": FP8_CHANNEL,
    "fp8_channel_w8a16": FP8_CHANNEL_W8A16,
    "mxfp8": MXFP8,
    "mxfp8_w8a16": MXFP8_W8A16,
    "w8a8_int8": W8A8_INT8,
    "w8a16_int8": W8A16_INT8,
    "w8a16_int8_g128": W8A16_INT8_G128,
    "w4a16_int4": W4A16_INT4,
    "w4a16_int4_g32": W4A16_INT4_G32,
    "w4a16_int4_g64": W4A16_INT4_G64,
    "w4a16_int4_g128": W4A16_INT4_G128,
    "w4a16_int4_asym_g128": W4A16_INT4_ASYM_G128,
    "w4a8_int8": W4A8_INT8,
    "w4a8_int8_g128": W4A8_INT8_G128,
    "w4a8_fp8_g128": W4A8_FP8_G128,
    "w4a4_int4": W4A4_INT4,
    "mxfp4": MXFP4,
    "mxfp4_w4a8": MXFP4_W4A8,
    "mxfp4_w4a8_g128": MXFP4_W4A8_G128,
    "mxfp4_w4a16": MXFP4_W4A16,
    "nvfp4": NVFP4,
    "nvfp4_w4a16": NVFP4_W4A16,
}
