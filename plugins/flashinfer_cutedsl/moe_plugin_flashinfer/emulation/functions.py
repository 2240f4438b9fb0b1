"""The emulated functions by the names that the library gives them, each behind its release's signature."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moe_plugin_flashinfer.emulation import masked, quantizers, wrapper
from moe_plugin_flashinfer.emulation.signatures import bound, signatures_of

_ALIKE: dict[str, Callable[..., Any]] = {
    "cute_dsl.convert_sf_to_mma_layout": wrapper.convert_sf_to_mma_layout,
    "fp4_quantize": quantizers.fp4_quantize,
    "gemm.grouped_gemm_nt_masked": masked.grouped_gemm_nt_masked,
    "nvfp4_quantize": quantizers.nvfp4_quantize,
    "scaled_fp4_grouped_quantize": quantizers.scaled_fp4_grouped_quantize,
    "silu_and_mul_scaled_nvfp4_experts_quantize": quantizers.silu_and_mul_scaled_nvfp4_experts_quantize,
}
_WRAPPER = "fused_moe.CuteDslMoEWrapper"
_FUSED, _FUSED_BEFORE = "fused_moe.cute_dsl_fused_moe", "fused_moe.cute_dsl_fused_moe_nvfp4"


@functools.cache
def functions(release: str) -> dict[str, Callable[..., Any]]:
    """Public name in `flashinfer` -> function or class, of one release."""
    asked = signatures_of(release)
    found = {name: bound(name, asked[name], function) for name, function in _ALIKE.items()}
    found[_WRAPPER] = wrapper.wrapper_class(asked)
    for name in (_FUSED, _FUSED_BEFORE):
        if name in asked:
            form = wrapper.functional_form(asked, is_deprecated=name == _FUSED_BEFORE and _FUSED in asked)
            found[name] = bound(name, asked[name], form)
    return found
