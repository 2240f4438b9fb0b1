"""The schemes that have names.

Formats: OCP Microscaling (MX) v1.0 for e2m1/e4m3/e8m0 with blocks of 32; block scales of 128 x 128 as in the
DeepSeek-V3 checkpoints; NVFP4 as e2m1 with e4m3 scales per 16 and one fp32 global scale.
"""

from __future__ import annotations

from typing import Any

import attrs

from moe_core.quant.scheme import WHOLE, QuantScheme


def _weight_only(weight_dtype: str, block: tuple[int, int], scale: str, **more: Any) -> QuantScheme:
    return QuantScheme(weight_dtype=weight_dtype, weight_block=block, weight_scale=scale, **more)


def _dynamic(weight: QuantScheme, dtype: str, group: int = WHOLE, scale: str = "fp32") -> QuantScheme:
    return attrs.evolve(
        weight, activation_dtype=dtype, activation_scaling="dynamic", activation_group=group, activation_scale=scale
    )


FP32 = QuantScheme(weight_dtype="fp32")
BF16 = QuantScheme(weight_dtype="bf16")
FP16 = QuantScheme(weight_dtype="fp16")
FP8_BLOCK128 = _dynamic(_weight_only("fp8", (128, 128), "fp32"), "fp8", 128)
FP8_BLOCK128_UE8M0 = _dynamic(_weight_only("fp8", (128, 128), "e8m0"), "fp8", 128, "e8m0")
W8A8_INT8 = _dynamic(_weight_only("int8", (1, WHOLE), "fp32"), "int8")
W4A8_INT8 = _dynamic(_weight_only("int4", (1, WHOLE), "fp32"), "int8")
W4A4_INT4 = _dynamic(_weight_only("int4", (1, WHOLE), "fp32"), "int4")
MXFP4_W4A16 = _weight_only("fp4", (1, 32), "e8m0")
MXFP8 = _dynamic(_weight_only("fp8", (1, 32), "e8m0"), "fp8", 32, "e8m0")
NVFP4_W4A16 = _weight_only("fp4", (1, 16), "e4m3", global_scale=True)
NVFP4 = attrs.evolve(
    NVFP4_W4A16, activation_dtype="fp4", activation_scaling="static", activation_group=16, activation_scale="e4m3"
)

#: Names by which the command line and the decisions call a scheme.
SCHEMES: dict[str, QuantScheme] = {
    "fp32": FP32,
    "bf16": BF16,
    "fp16": FP16,
    "fp8_block128": FP8_BLOCK128,
    "fp8_block128_ue8m0": FP8_BLOCK128_UE8M0,
    "w8a8_int8": W8A8_INT8,
    "w4a8_int8": W4A8_INT8,
    "w4a4_int4": W4A4_INT4,
    "mxfp4_w4a16": MXFP4_W4A16,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
    "nvfp4_w4a16": NVFP4_W4A16,
}
