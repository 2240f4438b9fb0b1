"""The quantization schemes whose weights `kernels.quantize` can read; free of torch, so that a spec may import it."""

from __future__ import annotations

from moe_core.quant import BF16, FP8_BLOCK128, FP16, FP32, MXFP4_W4A16, NVFP4, NVFP4_W4A16, W8A8_INT8, QuantScheme

#: Schemes of unquantized weights.
FLOAT_SCHEMES: tuple[QuantScheme, ...] = (FP32, BF16, FP16)
#: Every scheme with an entry in `kernels.quantize`; a test holds both together.
SUPPORTED_SCHEMES: tuple[QuantScheme, ...] = (*FLOAT_SCHEMES, FP8_BLOCK128, W8A8_INT8, MXFP4_W4A16, NVFP4, NVFP4_W4A16)
