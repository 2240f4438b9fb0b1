"""A case's spec (see `case_lib`) as a request of the layer."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from checkpoints import has_bias, layer_quant, look_up, values_per_element

from moe_core import ExpertPlacement, LayerRequest, Workload
from moe_core.activation import ActivationSpec

DTYPES = {"float32": ("fp32", torch.float32), "bfloat16": ("bf16", torch.bfloat16), "float16": ("fp16", torch.float16)}
ACTIVATIONS = {
    "swiglu": ActivationSpec(),
    "geglu": ActivationSpec(kind="gelu"),
    "geglu_tanh": ActivationSpec(kind="gelu_tanh"),
    "swiglu_oai": ActivationSpec(alpha=1.702, limit=7.0, beta=1.0),
    "swiglu_limit": ActivationSpec(limit=7.0),
    "swiglu_step": ActivationSpec(limit=7.0, clamp="after"),
    **{kind: ActivationSpec(kind=kind, gated=False) for kind in ("relu2", "gelu", "gelu_tanh", "silu", "relu")},
}


def activation(spec: dict[str, Any]) -> ActivationSpec:
    """What lies between the projections, with the spec's parameters where the kind has them."""
    default = look_up("activation", spec["activation"], ACTIVATIONS)
    changed = {"alpha": spec.get("alpha", default.alpha)} if default.alpha != 1.0 else {}
    if default.limit is not None:
        limit = spec.get("limit", default.limit)
        # The oracle's word for no clamp.
        changed |= {"limit": None, "clamp": "before"} if limit == math.inf else {"limit": limit}
    return attrs.evolve(default, **changed)


def dtype_of(spec: dict[str, Any]) -> tuple[str, torch.dtype]:
    """The layer's dtype, by its name here and as torch has it."""
    name, dtype = look_up("dtype", spec.get("dtype", "bfloat16"), DTYPES)
    return name, dtype


def make_request(spec: dict[str, Any], **more: Any) -> LayerRequest:
    """The request of a case's spec."""
    name, _ = dtype_of(spec)
    limit = spec.get("max_dispatch_tokens_per_rank")
    return LayerRequest(
        num_experts=_num_experts(spec),
        top_k=_top_k(spec),
        hidden_size=_hidden_size(spec),
        intermediate_size=_intermediate_size(spec),
        activation=activation(spec),
        dtype=name,
        quant=layer_quant(spec["ckpt"], name),
        bias=has_bias(spec["ckpt"]),
        weight_on_input=spec.get("weight_on_input", False),
        deterministic=spec.get("deterministic", False),
        workloads=[Workload(max_tokens=limit)],
        placement=_placement(spec.get("eplb")),
        tp_size=num_ranks(spec, "tp"),
        **more,
    )


def num_ranks(spec: dict[str, Any], kind: str) -> int:
    """The `ep` or `tp` ranks of a spec; one without a word."""
    ranks = spec.get(kind, 1)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"{kind}: expected a number of ranks, 1 or more, got {ranks!r}")
    return ranks


def _columns(spec: dict[str, Any], name: str) -> int:
    """How many values of `x` or `ids` each token has."""
    shape = list(spec[name].shape)
    if len(shape) != 2:
        raise ValueError(f"{name}: expected [tokens, {'H' if name == 'x' else 'slots'}], got {shape}")
    return int(shape[1])


def _top_k(spec: dict[str, Any]) -> int:
    """Slots of a token in one call; what has more is summed over calls."""
    slots = _columns(spec, "ids") if "ids" in spec else 1
    return max(1, min(slots, _num_experts(spec)))


def _hidden_size(spec: dict[str, Any]) -> int:
    if "x" in spec:
        return _columns(spec, "x")
    ckpt = spec["ckpt"]
    return int(ckpt["w2"].shape[2 if ckpt["orientation"] == "in_out" else 1])


def _num_experts(spec: dict[str, Any]) -> int:
    """How many experts ids tell apart; where a checkpoint says what lies in which place, ids are those of places."""
    places = spec["ckpt"].get("p2l")
    return int(spec["num_experts"]) if places is None else len(places)


def _placement(eplb: dict[str, Any] | None) -> ExpertPlacement:
    """Routed experts may have copies; the always-on ones follow them, once each."""
    if eplb is None:
        return ExpertPlacement()
    return ExpertPlacement("map", [int(expert) for expert in (*eplb["phys_to_log"], *eplb.get("shared", ()))])


def _intermediate_size(spec: dict[str, Any]) -> int:
    ckpt, halves = spec["ckpt"], 2 if activation(spec).gated else 1
    is_turned = ckpt["orientation"] == "in_out"
    rows = None if ckpt.get("w13") is None else ckpt["w13"].shape[2 if is_turned else 1]
    if rows is None or rows % halves:
        # The layer is to refuse what w13 is, not this function.
        return int(ckpt["w2"].shape[1 if is_turned else 2] * values_per_element(ckpt))
    return int(rows // halves)
