"""A right backend in plain loops, made of parts that the wrong ones replace one at a time."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from moe_core.activation import ActivationPattern
from moe_core.errors import InputError
from moe_core.hookspecs import hookimpl
from moe_core.payloads import (
    ContiguousTokens,
    ExpertGroup,
    MaskedTokens,
    PreparedTensor,
    PreparedWeights,
    RawWeights,
    StandardTokens,
)
from moe_core.plan import MoEPlan, Route
from moe_core.quant import BF16, PER_TENSOR, W8A8_INT8
from moe_core.specs import DispatcherSpec, Limit, PluginSpec, RunnerSpec, TokenDtype

Tensor = torch.Tensor
LAYOUT = "toy"
BF16_TOKENS = (TokenDtype("bf16"),)
#: int8 activations with a calibrated scale for each expert.
STATIC_INT8 = attrs.evolve(W8A8_INT8, activation_scaling="static", activation_group=PER_TENSOR)


@attrs.define(eq=False)
class Weights:
    """What the toy's experts read."""

    tensors: dict[str, Tensor]
    activation: Any
    post_norm: Any
    spec: Any
    rounds: bool


def gate_and_up(h: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = h.chunk(2)
    return gate, up


def activate(h: Tensor, weights: Weights) -> Tensor:
    if weights.activation is not None:
        return weights.activation(h[None])[0]
    spec = weights.spec
    gate, up = gate_and_up(h)
    if spec.limit is not None:
        up = up.clamp(-spec.limit, spec.limit)
        gate = gate.clamp(max=spec.limit) if spec.clamp == "before" else gate
    value = gate * torch.sigmoid(spec.alpha * gate)
    if spec.limit is not None and spec.clamp == "after":
        value = value.clamp(max=spec.limit)
    return value * (up + spec.beta)


def rounded(row: Tensor, name: str, expert: int, weights: Weights) -> Tensor:
    """A row as the GEMM of `name` reads it."""
    if not weights.rounds:
        return row
    static = weights.tensors.get(f"{name}_input_scale")
    scale = row.abs().amax() / 127.0 if static is None else static[expert]
    return row if scale == 0 else (row / scale).round().clamp(-128, 127) * scale


def matrix(name: str, expert: int, weights: Weights) -> Tensor:
    scale = weights.tensors.get(f"{name}_scale")
    values = weights.tensors[name][expert].float()
    return values if scale is None else values * scale[expert, :, None]


def expert_row(row: Tensor, expert: int, weights: Weights) -> Tensor:
    """One row `[H]` through one expert, in fp32 and unweighted."""
    x = row.float()
    h = matrix("w13", expert, weights) @ rounded(x, "w13", expert, weights)
    if "b13" in weights.tensors:
        h = h + weights.tensors["b13"][expert].float()
    a = activate(h, weights)
    out = matrix("w2", expert, weights) @ rounded(a, "w2", expert, weights)
    if "b2" in weights.tensors:
        out = out + weights.tensors["b2"][expert].float()
    return out if weights.post_norm is None else weights.post_norm(out[None])[0]


def prepare(weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Copies expert by expert; a reload refills."""
    if out is None:
        empty = {name: PreparedTensor(data=torch.empty_like(t).contiguous()) for name, t in weights.tensors.items()}
        out = PreparedWeights(layout=LAYOUT, tensors=empty)
    for expert in range(len(weights.tensors["w13"])):
        for name, tensor in weights.tensors.items():
            out[name][expert].copy_(tensor[expert])
        if weights.release is not None:
            weights.release(expert)
    out.activation, out.post_norm = weights.activation, weights.post_norm
    return out


def standard(tokens: StandardTokens, row: Callable[[Tensor, int], Tensor]) -> Tensor:
    out = torch.zeros(tokens.hidden_states.shape, dtype=torch.float32)
    for token, ids in enumerate(tokens.topk_ids.tolist()):
        for slot, expert in enumerate(ids):
            if expert >= 0:
                out[token] += row(tokens.hidden_states[token], expert) * tokens.topk_weights[token, slot].float()
    return out.to(tokens.hidden_states.dtype)


def fused(plan: MoEPlan, hidden: Tensor, ids: Tensor, weights: Tensor, row: Callable[[Tensor, int], Tensor]) -> Tensor:
    """One call for everything, ids checked."""
    check_ids(ids, plan.request.num_slots)
    return standard(StandardTokens(hidden_states=hidden, topk_ids=ids, topk_weights=weights), row)


def contiguous(tokens: ContiguousTokens, row: Callable[[Tensor, int], Tensor]) -> Tensor:
    out, start = torch.empty_like(tokens.hidden_states), 0
    for expert, (count, end) in enumerate(
        zip(tokens.num_tokens_per_expert.tolist(), tokens.group_ends.tolist(), strict=True)
    ):
        for index in range(start, start + count):
            out[index] = row(tokens.hidden_states[index], expert).to(out.dtype)
        start = end
    return out


def masked(tokens: MaskedTokens, row: Callable[[Tensor, int], Tensor]) -> Tensor:
    out = torch.empty_like(tokens.hidden_states)
    for expert, count in enumerate(tokens.masked_m.tolist()):
        for index in range(count):
            out[expert, index] = row(tokens.hidden_states[expert, index], expert).to(out.dtype)
    return out


ALIGNMENT = 4


def check_ids(topk_ids: Tensor, num_experts: int) -> None:
    if topk_ids.is_floating_point() or ((topk_ids < -1) | (topk_ids >= num_experts)).any():
        raise InputError(f"expert ids must be integers in -1..{num_experts - 1}")


def dispatch(
    plan: MoEPlan, group: ExpertGroup, hidden: Tensor, ids: Tensor, weights: Tensor
) -> tuple[ContiguousTokens, Any]:
    """Rows by local expert, each group padded to the alignment."""
    check_ids(ids, plan.request.num_slots)
    return group_rows(hidden, ids, weights, plan.request.local_slots(group.rank), ALIGNMENT)


def group_rows(
    hidden: Tensor, ids: Tensor, weights: Tensor, experts: Iterable[int], alignment: int
) -> tuple[ContiguousTokens, Any]:
    slots = [(ids == expert).nonzero() for expert in experts]
    counts = [len(found) for found in slots]
    ends = torch.tensor([-(-count // alignment) * alignment for count in counts], dtype=torch.int64).cumsum(0).int()
    # Zero, so that what reads padding is caught by the check for it alone.
    rows = hidden.new_zeros((int(ends[-1]), hidden.shape[1]))
    places, start = [], 0
    for found, end in zip(slots, ends.tolist(), strict=True):
        for index, (token, slot) in enumerate(found.tolist()):
            rows[start + index] = hidden[token]
            places.append((start + index, token, slot))
        start = end
    counted = torch.tensor(counts, dtype=torch.int32)
    tokens = ContiguousTokens(hidden_states=rows, num_tokens_per_expert=counted, group_ends=ends)
    return tokens, (places, weights, hidden.shape)


def combine(rows: Tensor, handle: Any) -> Tensor:
    places, weights, shape = handle
    out = torch.zeros(shape, dtype=torch.float32)
    for row, token, slot in places:
        out[token] += rows[row].float() * weights[token, slot].float()
    return out.to(torch.bfloat16)


@attrs.define(eq=False)
class Parts:
    """Everything that a wrong backend may do otherwise."""

    format: str = "standard"
    scheme: Any = BF16
    prepare: Callable[..., Any] = prepare
    expert_row: Callable[..., Tensor] = expert_row
    standard: Callable[..., Tensor] = standard
    contiguous: Callable[..., Tensor] = contiguous
    masked: Callable[..., Tensor] = masked
    dispatch: Callable[..., Any] = dispatch
    combine: Callable[..., Tensor] = combine
    #: `(parts, bound weights, plan) -> experts`, for what is wrong about binding.
    bind: Callable[..., Any] | None = None
    runner: dict[str, Any] = attrs.field(factory=dict)
    hooks: dict[str, Any] = attrs.field(factory=dict)


#: The parts behind each fake's binder, by the fake's name: a binder is named by text, so it looks here.
PARTS: dict[str, Parts] = {}


def binder(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[Any, Any]:
    parts = PARTS[route.dispatcher.plugin]  # type: ignore[union-attr]
    return lambda *tokens: parts.dispatch(plan, group, *tokens), parts.combine


def experts_of(parts: Parts, weights: Weights, plan: MoEPlan) -> Callable[[Any], Tensor]:
    def row(x: Tensor, expert: int) -> Tensor:
        return parts.expert_row(x, expert, weights)

    if parts.format == "fused":
        return lambda *tokens: fused(plan, *tokens, row)
    return lambda tokens: getattr(parts, parts.format)(tokens, row)


def specs(name: str, parts: Parts) -> PluginSpec:
    runner: dict[str, Any] = {
        "name": "toy",
        "kernel": parts.format,
        "format": parts.format,
        "reads": BF16_TOKENS,
        "schemes": (parts.scheme,),
        "activations": (ActivationPattern(parameters=True), ActivationPattern(kind="module")),
        "dtypes": ("bf16",),
        "weight_layout": LAYOUT,
        "bias": True,
        "post_norm": True,
        "phases": ("any",),
        "devices": ("cpu",),
        "row_alignment": ALIGNMENT if parts.format == "contiguous" else 1,
        "deterministic": True,
    }
    if parts.format == "fused":
        # A fused kernel finds its ranks by itself; this one has none.
        runner |= {"a2a": "toy_fused", "limits": (Limit("ep_size", "<=", 1),)}
    own = DispatcherSpec(
        name="toy",
        mode="contiguous",
        binder=f"{__name__}:binder",
        format="contiguous",
        sends=BF16_TOKENS,
        row_alignment=ALIGNMENT,
        dtypes=("bf16",),
        devices=("cpu",),
        token_placements=("replicated",),
        deterministic=True,
        phases=("any",),
    )
    dispatchers = (own,) if parts.format == "contiguous" else ()
    return PluginSpec(name=name, hook_api=1, dispatchers=dispatchers, runners=(RunnerSpec(**(runner | parts.runner)),))


def hooks_of(name: str, parts: Parts) -> dict[str, Callable[..., Any]]:
    """The hooks of a toy backend, unmarked."""
    PARTS[name] = parts
    spec = specs(name, parts)

    def declare_backends() -> PluginSpec:
        return spec

    def process_weights_after_loading(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> Any:
        return parts.prepare(weights, out)

    def fused_experts(plan: MoEPlan, route: Route, weights: PreparedWeights) -> Any:
        tensors = {key: tensor.data for key, tensor in weights.tensors.items()}
        rounds = plan.request.quant.w13.activation_dtype == "int8"
        bound = Weights(tensors, weights.activation, weights.post_norm, plan.request.activation, rounds)
        return (parts.bind or experts_of)(parts, bound, plan)

    functions = (declare_backends, process_weights_after_loading, fused_experts)
    return {**{function.__name__: function for function in functions}, **parts.hooks}


def make_plugin(name: str, parts: Parts | None = None) -> types.ModuleType:
    """A plugin module that exists in this process only."""
    module = types.ModuleType(f"fake_{name}")
    for hook, function in hooks_of(name, parts or Parts()).items():
        setattr(module, hook, hookimpl(function))
    return module
