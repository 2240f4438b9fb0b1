"""A float64 layer, token by token and slot by slot, and the random data of the kernel tests.

`reference_moe` knows the named activations; this one follows every field of `ActivationSpec`, and norms after experts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from reference_moe import rel

from moe_core.activation import ActivationSpec
from moe_core.payloads import Tensor

#: Error of the result's norm. bf16: inputs are exact, but a group of few rows rounds GEMM1's and GEMM2's results and
#: the activation to 8 bits (relative 2**-9 each, uncorrelated), and the output once more: about 4e-3; fp16 has three
#: more bits. fp32: sums of about 100 terms.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of the wanted; NaN counts as infinite."""
    return rel(got.double(), want.double())


def activate(h: Tensor, spec: ActivationSpec) -> Tensor:
    """`ActivationSpec`'s formulas, in float64."""

    def f(x: Tensor) -> Tensor:
        if spec.kind == "silu":
            return x / (1 + torch.exp(-spec.alpha * x))
        if spec.kind == "gelu":
            return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        if spec.kind == "gelu_tanh":
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        positive = torch.where(x > 0, x, 0.0)
        return positive if spec.kind == "relu" else positive * positive

    if not spec.gated:
        return f(h)
    half = h.shape[-1] // 2
    g, u = (h[..., ::2], h[..., 1::2]) if spec.row_order == "interleaved" else (h[..., :half], h[..., half:])
    if spec.limit is None:
        return f(g) * (u + spec.beta)
    u = u.clip(-spec.limit, spec.limit) + spec.beta
    return f(g.clip(max=spec.limit)) * u if spec.clamp == "before" else f(g).clip(max=spec.limit) * u


def layer(x: Tensor, ids: Tensor, weights: Tensor, params: dict[str, Any], spec: ActivationSpec) -> Tensor:
    """The layer's definition; `params` as made by `make_params`.

    Optional besides: `post_norm`, `weight_on_input`, and the rounding of all slots' inputs, `round_w13` and `round_w2`,
    which get the rows and the expert of each.
    """
    slots = [(t, k, int(ids[t, k])) for t in range(x.shape[0]) for k in range(ids.shape[1]) if ids[t, k] >= 0]
    result = torch.zeros(x.shape, dtype=torch.float64)
    if not slots:
        return result
    on_input = params.get("weight_on_input", False)
    rows = torch.stack([x[t].double() * (weights[t, k].double() if on_input else 1.0) for t, k, _ in slots])
    hidden = activate(_linear(rows, "13", [e for *_, e in slots], params), spec)
    outputs = _linear(hidden, "2", [e for *_, e in slots], params)
    for (t, k, _), row in zip(slots, outputs, strict=True):
        y = row if params.get("post_norm") is None else params["post_norm"](row[None])[0]
        result[t] += y if on_input else weights[t, k].double() * y
    return result


def _linear(rows: Tensor, number: str, experts: list[int], params: dict[str, Any]) -> Tensor:
    rounding = params.get(f"round_w{number}")
    rows = rows.double() if rounding is None else rounding(rows, experts)
    results = torch.stack([params[f"w{number}"][e].double() @ row for e, row in zip(experts, rows, strict=True)])
    bias = params.get(f"b{number}")
    return results if bias is None else results + bias[experts].double()


def make_params(
    experts: int, hidden: int, inner: int, dtype: torch.dtype, *, gated: bool = True, bias: bool = False
) -> dict[str, Any]:
    """Fresh weights whose gate and up halves differ in scale, so that a swap shows."""
    width = 2 * inner if gated else inner
    w13 = torch.randn(experts, width, hidden) / math.sqrt(hidden)
    w13[:, width // 2 :] *= 1.7
    params = {"w13": w13.to(dtype), "w2": (torch.randn(experts, hidden, inner) / math.sqrt(inner)).to(dtype)}
    if bias:
        params |= {"b13": torch.randn(experts, width).to(dtype), "b2": torch.randn(experts, hidden).to(dtype)}
    return params


def make_tokens(
    tokens: int, hidden: int, experts: int, top_k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, distinct ids and weights that do not sum to one."""
    ids = torch.rand(tokens, experts).topk(top_k, dim=-1).indices
    return torch.randn(tokens, hidden).to(dtype), ids, torch.rand(tokens, top_k) + 0.1
