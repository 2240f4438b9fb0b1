"""Kernels `wrapper` and `two_stage`: the library's whole layer, on tokens as they came.

Letters: `T` tokens, `K` top-k, `L` local experts, `H` hidden, `I` intermediate size.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch

from moe_core.kernel_library import require_keywords
from moe_core.kernels.on_device import on_device
from moe_core.payloads import ExpertsFn, PreparedWeights, StandardTokens, Tensor
from moe_core.plan import MoEPlan, Route
from moe_plugin_flashinfer.library import RUN, LibraryFunction, compiled, load
from moe_plugin_flashinfer.machine import FLASHINFER
from moe_plugin_flashinfer.prepared import WrapperWeights
from moe_plugin_flashinfer.weights import prepare

__all__ = ["bind", "prepare"]


def bind(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """The experts of one route, after a call with a token that no expert reads, which compiles them.

    Raises:
        PluginError: Weights in another layout, or a library without the functions or keywords of this route, or one
            that does not compile.
    """
    prepared = WrapperWeights.of(weights)
    device = prepared.w13.device
    if not prepared.w13.shape[0]:
        # A rank without experts; the library makes no layer of none.
        return functools.partial(_nothing, prepared)
    library = load(device)
    make = library.function("fused_moe.CuteDslMoEWrapper", *_options(route))
    fixed = {"output_dtype": torch.bfloat16, "device": str(device)}
    with on_device(device):
        wrapper = make(**_sizes(plan, route, prepared), **_options(route), **fixed)
    experts = WrapperExperts(
        run=require_keywords(wrapper.run, *RUN, of=FLASHINFER),
        quantize=None if route.token_dtype.dtype == "nvfp4" else library.function("fp4_quantize"),
        weights=prepared,
        top_k=plan.request.top_k,
        keeps_output=_keeps_memory(route),
    )
    compiled(route, experts.compile)
    return experts


def _options(route: Route) -> dict[str, bool]:
    """Sums over slots: in one kernel with atomic additions unless said otherwise."""
    return {"use_fused_finalize": False} if route.runner.spec.deterministic else {}


def _sizes(plan: MoEPlan, route: Route, weights: WrapperWeights) -> dict[str, Any]:
    num_experts = weights.w13.shape[0]
    return {
        # Ids are local here, whatever rank this is; those below zero belong to nobody.
        "num_experts": num_experts,
        "num_local_experts": num_experts,
        "local_expert_offset": 0,
        "top_k": plan.request.top_k,
        "hidden_size": weights.w2.shape[1],
        "intermediate_size": weights.w13.shape[1] // 2,
        # Memory that calls share, for a number of tokens; without one each call takes its own, captured or not.
        "use_cuda_graph": _keeps_memory(route),
        "max_num_tokens": route.max_tokens or 1,
    }


def _nothing(weights: WrapperWeights, tokens: StandardTokens) -> Tensor:
    """What no expert adds."""
    return weights.w13.new_zeros((tokens.topk_ids.shape[0], weights.w2.shape[1]), dtype=torch.bfloat16)


def _keeps_memory(route: Route) -> bool:
    return route.graph_capture and route.max_tokens is not None


@attrs.frozen(eq=False, kw_only=True)
class WrapperExperts:
    """Everything about the local experts that does not change between calls.

    Attributes:
        run: The library's call of a layer.
        quantize: bf16 tokens to codes; None where they arrive as codes.
        weights: What it reads.
        top_k: K.
        keeps_output: Whether the library returns memory that it writes again.
    """

    run: LibraryFunction
    quantize: LibraryFunction | None
    weights: WrapperWeights
    top_k: int
    keeps_output: bool

    @torch.no_grad()
    def __call__(self, tokens: StandardTokens) -> Tensor:
        """Tokens -> their weighted sums, bf16 `[T, H]`."""
        weights = self.weights
        if not tokens.topk_ids.shape[0]:
            return _nothing(weights, tokens)
        with on_device(weights.w13.device):
            rows, scales = self._operand(tokens)
            out = self.run(
                x=rows,
                x_sf=scales,
                token_selected_experts=tokens.topk_ids.to(torch.int32).contiguous(),
                token_final_scales=tokens.topk_weights.float().contiguous(),
                fc2_input_scale=weights.hidden_scale,
                w1_weight=weights.w13,
                w1_weight_sf=weights.w13_scale,
                w1_alpha=weights.w13_alpha,
                w2_weight=weights.w2,
                w2_weight_sf=weights.w2_scale,
                w2_alpha=weights.w2_alpha,
            )
        return out.clone() if self.keeps_output else out  # type: ignore[no-any-return]

    def _operand(self, tokens: StandardTokens) -> tuple[Tensor, Tensor]:
        """Codes uint8 `[T, H/2]` and their block scales as bytes `[T, H/16]`, row by row."""
        rows = tokens.hidden_states
        if self.quantize is None:
            return rows.contiguous(), tokens.scales.contiguous().view(torch.uint8)  # type: ignore[union-attr]
        # One row may have any stride, and the library takes a step of one from row to row for columns.
        plain = rows.flatten().view(rows.shape)
        return self.quantize(  # type: ignore[no-any-return]
            input=plain,
            global_scale=self.weights.x_scale,
            sf_vec_size=16,
            sf_use_ue8m0=False,
            is_sf_swizzled_layout=False,
        )

    def compile(self) -> None:
        """Run a token without expert."""
        width, new = self.weights.w2.shape[1], self.weights.w13.new_zeros
        is_rounded = self.quantize is None
        rows = new((1, width // 2)) if is_rounded else new((1, width), dtype=torch.bfloat16)
        self(
            StandardTokens(
                hidden_states=rows,
                topk_ids=new((1, self.top_k), dtype=torch.int32) - 1,
                topk_weights=new((1, self.top_k), dtype=torch.float32),
                scales=new((1, width // 16)).view(torch.float8_e4m3fn) if is_rounded else None,
            )
        )
