"""The quantization schemes whose weights `kernels.quantize` can read; free of torch, so that a spec may import it."""

from __future__ import annotations

import attrs

from moe_core.quant import BF16, FP8_BLOCK128, FP16, FP32, MXFP4_W4A16, NVFP4, NVFP4_W4A16, W8A8_INT8, QuantScheme

#: Schemes of unquantized weights.
FLOAT_SCHEMES: tuple[QuantScheme, ...] = (FP32, BF16, FP16)
#: Any tiles: a rank's share may cut those of the checkpoint.
_TILED = (attrs.evolve(scheme, weight_block="any") for scheme in (FP8_BLOCK128, MXFP4_W4A16, NVFP4, NVFP4_W4A16))
#: Patterns of all schemes that `kernels.quantize` can read.
SUPPORTED_SCHEMES: tuple[QuantScheme, ...] = (*FLOAT_SCHEMES, W8A8_INT8, *_TILED)
