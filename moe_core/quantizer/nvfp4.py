"""NVFP4 of one expert: gate and up share their global scale, since kernels that run them as one GEMM take one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_core.errors import SpecError
from moe_core.payloads import Tensor
from moe_core.quantizer.layout import Expert
from moe_core.quantizer.rounding import NVFP4_MAX, Quantized, nvfp4_global_scale, quantize_nvfp4
from moe_core.weights.codes import pack


class PackedNvfp4(NamedTuple):
    """One projection: `weight` uint8 `[N, K / 2]`, block scales e4m3 `[N, K / 16]`, fp32 scalar `global_scale`."""

    weight: Tensor
    scale: Tensor
    global_scale: Tensor


def pack_nvfp4(expert: Expert, *, divides: bool) -> dict[str, PackedNvfp4]:
    """Half -> the packed projection, whose global scale multiplies, or divides."""
    amax = {half: weight.abs().amax() for half, weight in expert.weights.items()}
    if "gate" in amax:
        amax["gate"] = amax["up"] = torch.maximum(amax["gate"], amax["up"])
    packed = {}
    for half, weight in expert.weights.items():
        scale = nvfp4_divisor(amax[half]) if divides else nvfp4_global_scale(amax[half])
        quantized: Quantized = quantize_nvfp4(weight, scale, divides=divides)
        packed[half] = PackedNvfp4(pack(quantized.codes, axis=1), quantized.scale, scale)
    return packed


def largest_input(scale: float) -> float:
    """The largest magnitude of inputs whose activation scale is `scale`.

    Raises:
        SpecError: `scale` is not positive, or too small or too large for a normal fp32 number.
    """
    numbers = torch.finfo(torch.float32)
    if not numbers.tiny <= scale <= numbers.max:
        raise SpecError(f"expected a scale from {numbers.tiny:.1e} to {numbers.max:.1e}, got {scale!r}")
    return scale * NVFP4_MAX


def nvfp4_divisor(amax: Tensor) -> Tensor:
    """The fp32 divisor 2688 / amax; 1 for a tensor of zeros, or so small that the quotient is no fp32 number."""
    divisor = (NVFP4_MAX / amax.double()).float()
    return torch.where(divisor.isfinite(), divisor, 1.0)
