"""Which operators one layer runs through: decided by its request alone, the same on every rank. Needs no torch.

| `w13` | `w2` reads | plain SwiGLU | otherwise |
|---|---|---|---|
| bf16 | bf16 | GEMM, `npu_swiglu` | GEMM, torch's activation |
| int8 | int8 | GEMM to int32, `npu_dequant_swiglu_quant` | GEMM to bf16, activation, `npu_dynamic_quant` |
| int4, int8 tokens | int8 | GEMM to bf16, `npu_dequant_swiglu_quant` | the same |
| int4, int4 tokens | int4 or int8 | GEMM to bf16, `npu_swiglu`, `npu_dynamic_quant` | the same |

`npu_dequant_swiglu_quant` takes the widths that `FUSED_WIDTHS` says, and layers of other widths go the other way.
"""

from __future__ import annotations

import attrs

from moe_core.activation import ActivationSpec
from moe_core.request import LayerRequest

#: Widest intermediate size of `npu_dequant_swiglu_quant` with groups, and what it is a multiple of (its docstring).
FUSED_WIDTHS = (10496, 64)


@attrs.frozen
class Steps:
    """The choices that preparation and execution share.

    Attributes:
        first: What multiplies `w13`: `bf16`, `w8a8`, `w4a8` or `w4a4`.
        second: What multiplies `w2`.
        is_plain: Whether the activation is the SwiGLU of the vendor's operators.
        is_fused: Whether one operator does activation and rounding to int8.
        keeps_sums: Whether the first GEMM gives int32 sums, which the fused operator scales.
    """

    first: str
    second: str
    is_plain: bool
    is_fused: bool
    keeps_sums: bool

    @classmethod
    def of(cls, request: LayerRequest) -> Steps:
        """The steps of a layer."""
        quant = request.local_quant
        first, second = (_kernel(scheme.weight_dtype, scheme.activation_dtype) for scheme in (quant.w13, quant.w2))
        is_plain = request.activation == ActivationSpec()
        widest, multiple = FUSED_WIDTHS
        width = request.local_intermediate_size
        fits = width <= widest and width % multiple == 0
        is_fused = is_plain and fits and first in ("w8a8", "w4a8") and second in ("w8a8", "w4a8")
        return cls(first, second, is_plain, is_fused, keeps_sums=is_fused and first == "w8a8")


def _kernel(weight: str, activation: str) -> str:
    bits = {"int8": "8", "int4": "4"}
    return f"w{bits[weight]}a{bits[activation]}" if weight in bits else weight
