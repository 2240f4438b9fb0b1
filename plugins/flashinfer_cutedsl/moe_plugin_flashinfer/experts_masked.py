"""Kernels `masked`: both projections of the local experts on blocks of rows, by the library's masked grouped GEMM.

Letters: `L` local experts, `M` rows of a block, `H` hidden, `I` intermediate size. The library takes blocks with the
expert as last axis, which are views of memory in which it comes first; it reads them through their pointers alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Self, TypeAlias

import attrs
import torch

from moe_core.activation import SWIGLU
from moe_core.kernels import ops
from moe_core.kernels.on_device import on_device
from moe_core.payloads import DownGemmOverlap, ExpertsFn, MaskedTokens, PreparedWeights, Tensor
from moe_core.plan import MoEPlan, Route
from moe_plugin_flashinfer.library import Library, LibraryFunction, compiled, load
from moe_plugin_flashinfer.prepared import MaskedWeights
from moe_plugin_flashinfer.runner_specs import ROW_ALIGNMENT
from moe_plugin_flashinfer.weights import prepare

__all__ = ["bind", "prepare"]

#: Codes `(M, K/2, L)` uint8 and their block scales, over memory with the expert first.
Operand: TypeAlias = tuple[Tensor, Tensor]
#: `(what is to be rounded, masked_m)` -> what a projection reads.
RoundFn: TypeAlias = Callable[[Tensor, Tensor], Operand]

#: How the library calls what it multiplies and what it writes.
_FORMATS = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "c_dtype": "bfloat16", "sf_vec_size": 16}
_GEMM = "gemm.grouped_gemm_nt_masked"


def bind(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """The experts of one route, after a call without rows that compiles them, with signals where the route has them.

    Raises:
        PluginError: Weights in another layout, or a library without the functions or keywords of this route, or one
            that does not compile.
    """
    prepared = MaskedWeights.of(weights)
    library = load(prepared.w13.device)
    overlapping = ("dst_signals", "sm_count") if route.down_gemm_overlap else ()
    experts = MaskedExperts(
        w13=Projection.of(library.function(_GEMM), prepared.w13, prepared.w13_scale, prepared.w13_alpha),
        w2=Projection.of(library.function(_GEMM, *overlapping), prepared.w2, prepared.w2_scale, prepared.w2_alpha),
        round_tokens=None if route.token_dtype.dtype == "nvfp4" else _rounder(library, prepared.x_scale),
        round_inside=_inside(library, plan, prepared.hidden_scale),
    )
    compiled(route, functools.partial(experts.compile, overlapping=route.down_gemm_overlap))
    return experts


def _rounder(library: Library, scale: Tensor) -> RoundFn:
    quantize = library.function("scaled_fp4_grouped_quantize")
    return lambda rows, masked_m: quantize(a=rows, mask=masked_m, a_global_sf=scale)


def _inside(library: Library, plan: MoEPlan, scale: Tensor) -> RoundFn:
    """Activation and rounding: one kernel of the library for SwiGLU, the core's block and another for the rest."""
    activation = plan.request.activation
    if activation == SWIGLU:
        fused = library.function("silu_and_mul_scaled_nvfp4_experts_quantize")
        return lambda hidden, masked_m: fused(a=hidden, mask=masked_m, a_global_sf=scale)
    rounded = _rounder(library, scale)
    return lambda hidden, masked_m: rounded(ops.activate(hidden, activation, real=masked_m), masked_m)


@attrs.frozen(eq=False)
class Projection:
    """One projection of all local experts.

    Attributes:
        gemm: The library's masked grouped GEMM.
        weights: Codes uint8 `(N, K/2, L)` over memory with the expert first, and e4m3 `[L, N, K/16]`, swizzled.
        alpha: fp32 `[L]`.
    """

    gemm: LibraryFunction
    weights: Operand
    alpha: Tensor

    @classmethod
    def of(cls, gemm: LibraryFunction, codes: Tensor, scale: Tensor, alpha: Tensor) -> Self:
        """From codes `[L, N, K/2]`; the view that the library takes is made once, and shows a reload."""
        return cls(gemm, (codes.permute(1, 2, 0), scale), alpha)

    @property
    def num_outputs(self) -> int:
        """`N`."""
        return self.weights[0].shape[0]

    def __call__(self, rows: Operand, masked_m: Tensor, overlap: DownGemmOverlap | None = None) -> Tensor:
        """bf16 `[L, M, N]`; rows from `masked_m` on are undefined memory.

        With `overlap` another stream may read an expert's rows as soon as its signal says so.
        """
        num_rows, num_experts = rows[0].shape[0], self.alpha.shape[0]
        out = self.alpha.new_empty((num_experts, num_rows, self.num_outputs), dtype=torch.bfloat16)
        signals = {}
        if overlap is not None:
            overlap.start()
            signals = {"dst_signals": overlap.signals, "sm_count": overlap.num_multiprocessors}
        self.gemm(
            lhs=rows,
            rhs=self.weights,
            out=out.permute(1, 2, 0),
            masked_m=masked_m,
            alpha=self.alpha,
            alpha_dtype="float32",
            **_FORMATS,
            **signals,
        )
        return out


@attrs.frozen(eq=False, kw_only=True)
class MaskedExperts:
    """Everything about the local experts that does not change between calls.

    Attributes:
        w13: First projection.
        w2: Second projection.
        round_tokens: bf16 tokens to codes; None where they arrive as codes.
        round_inside: `[L, M, 2I]` (not gated `[L, M, I]`) between the projections to codes `[L, M, I]`.
    """

    w13: Projection
    w2: Projection
    round_tokens: RoundFn | None
    round_inside: RoundFn

    @torch.no_grad()
    def __call__(self, tokens: MaskedTokens) -> Tensor:
        """Blocks of rows -> unweighted bf16 `[L, M, H]`; rows from `masked_m` on are undefined."""
        rows, masked_m = tokens.hidden_states, tokens.masked_m
        if not rows.shape[0]:
            if tokens.down_gemm_overlap is not None:
                # Combine waits for it on a rank without experts too.
                tokens.down_gemm_overlap.start()
            return rows.new_empty((0, rows.shape[1], self.w2.num_outputs), dtype=torch.bfloat16)
        with on_device(rows.device):
            hidden = self.w13(self._operand(tokens), masked_m)
            return self.w2(self.round_inside(hidden, masked_m), masked_m, tokens.down_gemm_overlap)

    def _operand(self, tokens: MaskedTokens) -> Operand:
        if self.round_tokens is not None:
            return self.round_tokens(tokens.hidden_states.contiguous(), tokens.masked_m)
        # Scales lie in tiles already; their shape says nothing to the library.
        return tokens.hidden_states.permute(1, 2, 0), tokens.scales  # type: ignore[return-value]

    def compile(self, *, overlapping: bool) -> None:
        """Run everything without any row; `overlapping`, with signals, for which there is a kernel of its own."""
        _, packed, num_experts = self.w13.weights[0].shape
        new, scales, overlap = self.w13.weights[0].new_zeros, None, None
        if self.round_tokens is None:
            rows = new((num_experts, ROW_ALIGNMENT, packed))
            scales = new((num_experts, ROW_ALIGNMENT, packed // 8)).view(torch.float8_e4m3fn)
        else:
            rows = new((num_experts, ROW_ALIGNMENT, packed * 2), dtype=torch.bfloat16)
        masked_m = new(num_experts, dtype=torch.int32)
        if overlapping:
            signals = torch.zeros_like(masked_m)
            overlap = DownGemmOverlap(signals=signals, num_multiprocessors=1, start=lambda: None)
        self(MaskedTokens(hidden_states=rows, masked_m=masked_m, scales=scales, down_gemm_overlap=overlap))
