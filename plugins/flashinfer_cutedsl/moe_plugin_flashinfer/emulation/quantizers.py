"""The library's NVFP4 quantizers: masked blocks of rows, the same behind SwiGLU, and plain rows.

Letters: `L` local experts, `M` rows of each, `K` channels, `m_pad`, `k_pad` whole tiles of block scales.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch.nn import functional

from moe_core.payloads import Tensor
from moe_core.testing.memory import poison
from moe_plugin_flashinfer.emulation import nvfp4
from moe_plugin_flashinfer.emulation.memory import BLOCK, swizzled_places, swizzled_shape
from moe_plugin_flashinfer.emulation.operators import operator
from moe_plugin_flashinfer.emulation.signatures import Default, refuse_others

#: Switches the search for scales on in releases whose quantizers have `nvfp4_4over6`, unless they are told.
FOUR_OVER_SIX = "FLASHINFER_NVFP4_4OVER6"
#: Layouts of block scales: the values of the library's enumeration.
SWIZZLED_128X4, SWIZZLED_8X4, LINEAR = 0, 1, 2


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise RuntimeError(f"Check failed: {rule}")


def scaled_fp4_grouped_quantize(
    a: Tensor, mask: Tensor, a_global_sf: Tensor, nvfp4_4over6: Any = None
) -> tuple[Tensor, Tensor]:
    """bf16 or fp16 `[L, M, K]` -> bytes `(M, K/2, L)` and scales `(32, 4, m_pad/128, 4, k_pad/4, L)`, both views.

    Rows from `mask` on are not read, and in both results not written.
    """
    return _grouped(a, mask, a_global_sf, swiglu=False, search=_searches(nvfp4_4over6))


def silu_and_mul_scaled_nvfp4_experts_quantize(
    a: Tensor, mask: Tensor, a_global_sf: Tensor, nvfp4_4over6: Any = None
) -> tuple[Tensor, Tensor]:
    """As `scaled_fp4_grouped_quantize`, of silu(first half) * second half of `[L, M, 2K]`, rounded to its dtype."""
    return _grouped(a, mask, a_global_sf, swiglu=True, search=_searches(nvfp4_4over6))


def _searches(setting: Any) -> bool:
    if setting is None:
        return False
    if not isinstance(setting, Default):
        raise TypeError(f"nvfp4_4over6 must be an NVFP44Over6Config or None (or omitted); got {setting!r}")
    is_on = os.environ.get(FOUR_OVER_SIX) == "1"
    if is_on:
        warnings.warn(f"{FOUR_OVER_SIX} is deprecated; pass nvfp4_4over6 explicitly instead", FutureWarning, 4)
    return is_on


def _grouped(a: Tensor, mask: Tensor, scale: Tensor, *, swiglu: bool, search: bool) -> tuple[Tensor, Tensor]:
    num_experts, rows, width = a.shape
    channels = width // 2 if swiglu else width
    if channels % BLOCK:
        raise AssertionError(f"k must be multiple of 16, but got {channels}.")
    for name, tensor in (("input", a), ("mask", mask), ("input_global_scale", scale)):
        _require(tensor.is_contiguous(), f"{name} must be contiguous")
    _require(mask.dtype == torch.int32 and mask.dim() == 1, "mask is int32, of one axis")
    _require(scale.dtype == torch.float32 and scale.dim() == 1, "input_global_scale is float32, of one axis")
    _require(mask.shape == scale.shape, "mask and input_global_scale have one element for each expert")
    # The kernel takes the number of experts from the scales, and the rows of each from what that leaves.
    _require(scale.shape[0] == num_experts, "input_global_scale has one element for each expert")
    if a.dtype not in (torch.bfloat16, torch.float16):
        raise NotImplementedError("only supports input tensor with dtypes fp16/bf16.")
    packed, tiles = _GROUPED_QUANTIZE(a, mask, scale, swiglu, search)
    m_pad, k_pad = swizzled_shape(rows, channels)
    in_tiles = tiles.view(torch.float8_e4m3fn).view(num_experts, m_pad // 128, k_pad // 4, 32, 4, 4)
    return packed.permute(1, 2, 0), in_tiles.permute(3, 4, 1, 5, 2, 0)


@operator("grouped_quantize(Tensor a, Tensor mask, Tensor scale, bool swiglu, bool search) -> (Tensor, Tensor)")
def _grouped_quantize(a: Tensor, mask: Tensor, scale: Tensor, swiglu: bool, search: bool) -> tuple[Tensor, Tensor]:
    num_experts, rows, width = a.shape
    channels = width // 2 if swiglu else width
    expert, row = (torch.arange(rows) < mask[:, None]).nonzero(as_tuple=True)
    numbers = a[expert, row]
    if swiglu:
        gate, up = numbers.float().chunk(2, dim=1)
        numbers = (functional.silu(gate) * up).to(a.dtype)
    quantize = nvfp4.quantize_by_search if search else nvfp4.quantize
    codes, scales = quantize(numbers, scale[expert])
    packed = poison(torch.empty((num_experts, rows, channels // 2), dtype=torch.uint8))
    tiles = poison(torch.empty((num_experts, *swizzled_shape(rows, channels)), dtype=torch.float8_e4m3fn))
    packed[expert, row] = codes
    tiles = tiles.view(torch.uint8)
    tiles.view(num_experts, -1)[expert[:, None], swizzled_places(rows, channels)[row]] = scales.view(torch.uint8)
    return packed, tiles


_GROUPED_QUANTIZE = torch.ops.emulated_flashinfer.grouped_quantize


def fp4_quantize(
    input: Tensor,
    global_scale: Tensor | None = None,
    sf_vec_size: int = BLOCK,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    nvfp4_4over6: Any = None,
) -> tuple[Tensor, Tensor]:
    """bf16 or fp16 `[rows, K]` -> bytes `[rows, K/2]`, and uint8 scales `[rows, K/16]` or `[m_pad, k_pad]`."""
    if sf_vec_size not in (16, 32):
        raise NotImplementedError("sf_vec_size can only be 16 or 32")
    refuse_others(
        "fp4_quantize",
        sf_vec_size=sf_vec_size != BLOCK,
        sf_use_ue8m0=sf_use_ue8m0,
        is_sf_8x4_layout=is_sf_8x4_layout,
        is_global_scale_inversed=is_global_scale_inversed,
        backend=backend != "cuda",
    )
    if input.stride(-2) == 1:
        # Taken for columns, and so is a single row with such a stride.
        input = input.transpose(-2, -1)
    if global_scale is None or input.shape[-1] % BLOCK:
        raise AssertionError("a global scale, and a multiple of 16 channels")
    _require(input.dim() == 2 and input.is_contiguous(), "input is contiguous, of two axes")
    _require(global_scale.dtype == torch.float32 and global_scale.numel() == 1, "global_scale is one float32")
    _require(input.dtype in (torch.bfloat16, torch.float16), "input is fp16 or bf16")
    packed, scales = _QUANTIZE(input, global_scale, is_sf_swizzled_layout, _searches(nvfp4_4over6))
    return packed, scales


def nvfp4_quantize(
    a: Tensor,
    a_global_sf: Tensor,
    sfLayout: int = SWIZZLED_128X4,
    do_shuffle: bool = False,
    sf_vec_size: int = BLOCK,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    nvfp4_4over6: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """As `fp4_quantize`, by the layout of the scales."""
    refuse_others("nvfp4_quantize", do_shuffle=do_shuffle, **others)
    return fp4_quantize(
        a,
        a_global_sf,
        sf_vec_size,
        is_sf_swizzled_layout=sfLayout != LINEAR,
        is_sf_8x4_layout=sfLayout == SWIZZLED_8X4,
        backend=backend,
        nvfp4_4over6=nvfp4_4over6,
    )


@operator("quantize(Tensor a, Tensor scale, bool swizzled, bool search) -> (Tensor, Tensor)")
def _quantize(a: Tensor, scale: Tensor, swizzled: bool, search: bool) -> tuple[Tensor, Tensor]:
    packed, scales = (nvfp4.quantize_by_search if search else nvfp4.quantize)(a, scale.view(1))
    found = scales.view(torch.uint8)
    if not swizzled:
        return packed, found
    # Whatever fills whole tiles is written too, as zeros.
    tiles = torch.zeros(swizzled_shape(*a.shape), dtype=torch.uint8)
    tiles.view(-1)[swizzled_places(*a.shape)] = found
    return packed, tiles


_QUANTIZE = torch.ops.emulated_flashinfer.quantize
