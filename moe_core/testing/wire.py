"""The kit's own plugin: it sends tokens in every form that has a meaning, and reads them in every form.

A runner that declares quantized tokens is tested with them where no dispatcher beside it sends them, and a dispatcher
where no runner beside it reads them. One spec for each form, so that a pair shares exactly one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch

from moe_core.activation import ActivationPattern
from moe_core.backends.torch import local
from moe_core.hookspecs import hookimpl
from moe_core.payloads import (
    TORCH_DTYPES,
    CombineFn,
    ContiguousTokens,
    Dispatched,
    DispatchFn,
    ExpertGroup,
    ExpertsFn,
    PreparedTensor,
    PreparedWeights,
    RawWeights,
    StandardTokens,
    Tensor,
)
from moe_core.plan import MoEPlan, Route
from moe_core.quant import BF16
from moe_core.specs import DispatcherSpec, Limit, PluginSpec, RunnerSpec, TokenDtype
from moe_core.testing.reference import ReferenceLayer
from moe_core.testing.stored import input_unit
from moe_core.testing.tokens import TILE_CHANNELS, TILE_ROWS, WIRE_DTYPES, as_tokens, one_scale, rounds_as, token_values

NAME = "conformance_kit"
#: Two scales in fp32 that mean one.
_SAME = 1e-6
_LAYOUT = "conformance_kit_raw"
_BINDERS: dict[str, Callable[..., Any]] = {
    "standard": local.bind_standard,
    "contiguous": local.bind_contiguous,
    "masked": local.bind_masked,
}


def _sender(format_: str, token: TokenDtype) -> DispatcherSpec:
    return DispatcherSpec(
        name="kit_sender",
        mode=f"{format_}_{token.dtype}_{token.scales}",
        binder=f"{__name__}:bind",
        format=format_,
        sends=(token,),
        token_placements=("replicated",),
        deterministic=True,
        limits=_limits(token),
    )


def _reader(format_: str, token: TokenDtype) -> RunnerSpec:
    return RunnerSpec(
        name="kit_reader",
        kernel=f"{format_}_{token.dtype}_{token.scales}",
        format=format_,
        reads=(token,),
        schemes=(BF16,),
        dtypes=("bf16",),
        activations=(ActivationPattern(),),
        weight_layout=_LAYOUT,
        tier="reference",
        limits=_limits(token),
        row_alignment=TILE_ROWS if _limits(token) else 1,
    )


def _limits(token: TokenDtype) -> tuple[Limit, ...]:
    return (Limit("hidden_size", "multiple_of", TILE_CHANNELS),) if token.scales == "block_16_tiled" else ()


@hookimpl
def declare_backends() -> PluginSpec:
    """Every form of tokens in every format; tiles are of the rows of one expert."""
    forms = [(f, token) for f in _BINDERS for token in WIRE_DTYPES if f == "masked" or not _limits(token)]
    return PluginSpec(
        name=NAME,
        hook_api=1,
        dispatchers=[_sender(*form) for form in forms],
        runners=[_reader(*form) for form in forms],
    )


def bind(
    plan: MoEPlan, route: Route, group: ExpertGroup, token_scale: Tensor | None = None
) -> tuple[DispatchFn, CombineFn]:
    """The built-in local dispatch, whose rows are then rounded to the route's token dtype."""
    floats = attrs.evolve(route, token_dtype=TokenDtype(plan.request.dtype))
    send, combine = _BINDERS[route.runner.spec.format](plan, floats, group)
    token_dtype = route.token_dtype
    is_static = plan.request.local_quant.w13.activation_scaling == "static"
    unit = input_unit("w13", plan.request) if is_static else None

    def dispatch(*tokens: Tensor) -> tuple[Dispatched, Any]:
        dispatched, handle = send(*tokens)
        scale = unit
        if (
            unit is not None
            and token_scale is not None
            and not math.isclose(unit * float(token_scale), 1, rel_tol=_SAME)
        ):
            # Not what the checkpoint says; the answer will tell.
            scale = 1 / float(token_scale)
        if scale is None and token_dtype.scales == "tensor":
            # Rows between the groups are undefined.
            scale = one_scale(tokens[0].nan_to_num(0.0), rounds_as(token_dtype)[0])
        rows, scales = as_tokens(dispatched.hidden_states, token_dtype, scale)
        return attrs.evolve(dispatched, hidden_states=rows, scales=scales), handle

    return dispatch, combine


@hookimpl
def process_weights_after_loading(weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Raw weights as they are."""
    tensors = {name: PreparedTensor(data=tensor.clone()) for name, tensor in weights.tensors.items()}
    return PreparedWeights(layout=_LAYOUT, tensors=tensors)


@hookimpl
def fused_experts(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """The float64 layer, row by row."""
    w13, w2 = (weights[name].cpu().double() for name in ("w13", "w2"))
    layer = ReferenceLayer(w13=w13, w2=w2, activation=plan.request.activation)
    return functools.partial(_experts, layer, route.token_dtype, TORCH_DTYPES[plan.request.dtype])


def _experts(layer: ReferenceLayer, token_dtype: TokenDtype, dtype: torch.dtype, tokens: Dispatched) -> Tensor:
    values = token_values(tokens.hidden_states, tokens.scales, token_dtype)
    if isinstance(tokens, StandardTokens):
        rows = layer(values, tokens.topk_ids, tokens.topk_weights)
    else:
        ids = _expert_of_rows(tokens)[:, None]
        rows = layer(values, ids, torch.ones(ids.shape))
    shape = (*tokens.hidden_states.shape[:-1], rows.shape[1])
    return rows.to(dtype).view(shape).to(tokens.hidden_states.device)


def _expert_of_rows(tokens: Dispatched) -> Tensor:
    """The local expert of each row, -1 for undefined ones."""
    experts = torch.full((tokens.hidden_states.shape[:-1].numel(),), -1)
    if isinstance(tokens, ContiguousTokens):
        starts = [0, *tokens.group_ends.tolist()]
        counts = tokens.num_tokens_per_expert.tolist()
    else:
        block = tokens.hidden_states.shape[1]
        counts = tokens.masked_m.tolist()  # type: ignore[union-attr]
        starts = [expert * block for expert in range(len(counts))]
    for expert, count in enumerate(counts):
        experts[starts[expert] : starts[expert] + count] = expert
    return experts
