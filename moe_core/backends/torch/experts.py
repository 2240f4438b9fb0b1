"""The torch runners: bind the shared experts kernels to one route's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moe_core.kernels.activation import activation_function
from moe_core.kernels.expert_weights import ExpertLinear, Experts
from moe_core.kernels.experts import experts_contiguous, experts_masked, experts_standard
from moe_core.kernels.number_formats import byte_pairs
from moe_core.payloads import (
    ContiguousTokens,
    ExpertsFn,
    MaskedTokens,
    PreparedWeights,
    StandardTokens,
    Tensor,
    bias_name,
)
from moe_core.plan import MoEPlan, Route
from moe_core.quant import WEIGHT_BITS, QuantScheme


def bind(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """The experts of one route, in the signature of its format."""
    request = plan.request
    experts = Experts(
        w13=_linear(weights, "w13", request.local_quant.w13),
        w2=_linear(weights, "w2", request.local_quant.w2),
        activation=weights.activation or activation_function(request.activation),
        post_norm=weights.post_norm,
        # In the other formats the dispatcher applies the weights, on whichever side.
        weight_on_input=request.weight_on_input and route.runner.spec.format == "standard",
        deterministic=route.runner.spec.deterministic,
    )
    return partial(_RUNNERS[route.runner.spec.format], experts)


def _linear(weights: PreparedWeights, name: str, scheme: QuantScheme) -> ExpertLinear:
    if WEIGHT_BITS[scheme.weight_dtype] == 4:
        # Kept from now on: its upload would make the first forward wait for the device.
        byte_pairs(scheme.weight_dtype, weights[name].device)
    return ExpertLinear.of(
        scheme,
        weights[name],
        scale=weights.get(f"{name}_scale"),
        zero_point=weights.get(f"{name}_zero_point"),
        output_scale=weights.get(f"{name}_output_scale"),
        input_scale=weights.get(f"{name}_input_scale"),
        bias=weights.get(bias_name(name)),
    )


def _standard(experts: Experts, tokens: StandardTokens) -> Tensor:
    return experts_standard(tokens.hidden_states, tokens.topk_ids, tokens.topk_weights, experts)


def _contiguous(experts: Experts, tokens: ContiguousTokens) -> Tensor:
    return experts_contiguous(tokens.hidden_states, tokens.num_tokens_per_expert, tokens.group_ends, experts)


def _masked(experts: Experts, tokens: MaskedTokens) -> Tensor:
    return experts_masked(tokens.hidden_states, tokens.masked_m, experts)


_RUNNERS: dict[str, Callable[..., Tensor]] = {"standard": _standard, "contiguous": _contiguous, "masked": _masked}
