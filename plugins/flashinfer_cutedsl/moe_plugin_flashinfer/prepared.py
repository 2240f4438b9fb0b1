"""Prepared weights of each runner as typed objects; the tag decides, so that one runner's never reach the other.

Shapes: `L` local experts, `H` hidden, `I` intermediate. Codes are uint8 with two e2m1 to a byte, block scales e4m3 for
16 inputs, swizzled (see `layouts`), scalars fp32. All tensors are those of `PreparedWeights`, or views of them, so that
a reload shows in every object made before.
"""

from __future__ import annotations

from typing import Self

import attrs
import torch

from moe_core.errors import PluginError
from moe_core.payloads import PreparedWeights, Tensor
from moe_plugin_flashinfer.layouts import mma_view
from moe_plugin_flashinfer.runner_specs import MASKED, WRAPPER

#: Bytes in which the kernels' bulk copies count.
ALIGNMENT = 16


def is_readable(tensor: Tensor) -> bool:
    """Whether a kernel can read it through a pointer: row by row, without gaps, from a multiple of 16 bytes on."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


@attrs.frozen(eq=False, kw_only=True)
class _Weights:
    """What both kernels read, by the names of the prepared tensors; each layout says its shapes."""

    w13: Tensor
    w13_scale: Tensor
    w13_alpha: Tensor
    w2: Tensor
    w2_scale: Tensor
    w2_alpha: Tensor
    x_scale: Tensor
    hidden_scale: Tensor

    @classmethod
    def _tensors(cls, layout: str, prepared: PreparedWeights) -> dict[str, Tensor]:
        if prepared.layout != layout:
            raise PluginError(
                f"these weights have the layout {prepared.layout!r}, this runner reads {layout!r} and would take them "
                "for other numbers; prepare them from the raw weights"
            )
        tensors = {name: prepared[name] for name in attrs.fields_dict(cls)}
        gaps = [name for name, tensor in tensors.items() if not is_readable(tensor) and tensor.dtype != torch.float32]
        if gaps:
            raise PluginError(
                f"{', '.join(gaps)}: the kernels read through pointers and need contiguous memory from a multiple of "
                f"{ALIGNMENT} bytes on; prepare the weights again from the raw ones"
            )
        return tensors


@attrs.frozen(eq=False, kw_only=True)
class MaskedWeights(_Weights):
    """For `grouped_gemm_nt_masked`.

    Attributes:
        w13: uint8 `[L, 2I, H/2]`, rows [gate; up] as they are stored; not gated `[L, I, H/2]`.
        w13_scale: e4m3 `[L, 2I, H/16]`, swizzled bytes.
        w13_alpha: `[L]`, multiplies the first GEMM's sums.
        w2: uint8 `[L, H, I/2]`.
        w2_scale: e4m3 `[L, H, I/16]`, swizzled bytes.
        w2_alpha: `[L]`, multiplies the second GEMM's sums.
        x_scale: `[L]`, multiplies tokens before they are rounded.
        hidden_scale: `[L]`, multiplies the activation before it is rounded.
    """

    @classmethod
    def of(cls, prepared: PreparedWeights) -> Self:
        """The same tensors; `PluginError` for another layout's, or for memory that no kernel can read."""
        return cls(**cls._tensors(MASKED, prepared))


@attrs.frozen(eq=False, kw_only=True)
class WrapperWeights(_Weights):
    """For `CuteDslMoEWrapper`.

    Attributes:
        w13: uint8 `[L, 2I, H/2]`, rows of up and gate in turns of 64, up first.
        w13_scale: e4m3, the MMA view `(32, 4, 2I/128, 4, H/64, L)` of swizzled scales whose rows lie as those of `w13`.
        w13_alpha: `[L]`, multiplies the first GEMM's sums.
        w2: uint8 `[L, H, I/2]`.
        w2_scale: e4m3, the MMA view `(32, 4, H/128, 4, I/64, L)`.
        w2_alpha: `[L]`, multiplies the second GEMM's sums.
        x_scale: `[1]`, multiplies tokens before they are rounded.
        hidden_scale: `[1]`, multiplies the activation before it is rounded; `fc2_input_scale` of the library.
    """

    @classmethod
    def of(cls, prepared: PreparedWeights) -> Self:
        """The same tensors, scales as views; `PluginError` as `MaskedWeights.of`."""
        tensors = cls._tensors(WRAPPER, prepared)
        views = {name: mma_view(tensors[name]) for name in ("w13_scale", "w2_scale")}
        return cls(**tensors | views)
