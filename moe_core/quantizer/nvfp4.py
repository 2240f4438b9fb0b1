"""NVFP4 of one expert: gate and up share their global scale, since kernels that run them as one GEMM take one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_core.payloads import Tensor
from moe_core.quantizer.number_formats import NVFP4_MAX, Quantized, nvfp4_global_scale, quantize_nvfp4
from moe_core.quantizer.packing import pack_pairs
from moe_core.quantizer.storage import Expert


class PackedNvfp4(NamedTuple):
    """One projection: `weight` uint8 `[N, K / 2]`, block scales e4m3 `[N, K / 16]`, fp32 scalar `global_scale`."""

    weight: Tensor
    scale: Tensor
    global_scale: Tensor


def pack_nvfp4(expert: Expert, *, divides: bool) -> dict[str, PackedNvfp4]:
    """Role -> the packed projection, whose global scale multiplies, or divides."""
    amax = {role: weight.abs().amax() for role, weight in expert.weights.items()}
    if "gate" in amax:
        amax["gate"] = amax["up"] = torch.maximum(amax["gate"], amax["up"])
    packed = {}
    for role, weight in expert.weights.items():
        scale = nvfp4_divisor(amax[role]) if divides else nvfp4_global_scale(amax[role])
        quantized: Quantized = quantize_nvfp4(weight, scale, divides=divides)
        packed[role] = PackedNvfp4(pack_pairs(quantized.codes, axis=1), quantized.scale, scale)
    return packed


def nvfp4_divisor(amax: Tensor) -> Tensor:
    """The fp32 divisor 2688 / amax; 1 for a tensor of zeros, or so small that the quotient is no fp32 number."""
    divisor = (NVFP4_MAX / amax.double()).float()
    return torch.where(divisor.isfinite(), divisor, 1.0)
