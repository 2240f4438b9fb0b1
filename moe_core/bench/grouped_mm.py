"""A layer around torch's grouped GEMM, as someone would write it by hand who wants it fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from moe_core.payloads import Tensor
from moe_core.request import LayerRequest
from moe_core.tuning.layers import LayerCall


def swiglu(rows: Tensor) -> Tensor:
    """`[rows, 2I]` -> `[rows, I]`, rounded once."""
    gate, up = rows.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(rows.dtype)


def _weighted_sum(rows: Tensor, places: Tensor, topk_weights: Tensor) -> Tensor:
    """Rows in the order of the experts `[T * K, H]` -> `[T, H]`, summed in fp32."""
    back = rows[places].view(*topk_weights.shape, rows.shape[1])
    return (back.float() * topk_weights.float()[:, :, None]).sum(dim=1).to(rows.dtype)


@cache
def fused(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function as one kernel, for any number of rows; on a CPU as it is."""
    return function if device == "cpu" else torch.compile(function, dynamic=True)


def bind(request: LayerRequest, weights: Mapping[str, Tensor]) -> LayerCall:
    """Sort by expert, multiply, activate, multiply, add up: nothing waits for the host."""
    w13, w2 = weights["w13"].mT, weights["w2"].mT
    device = w13.device.type
    # Two bytes hold every id: the sort passes over fewer bits.
    experts = torch.arange(request.num_experts, device=w13.device, dtype=torch.int16)
    activate, add_up = fused(swiglu, device), fused(_weighted_sum, device)

    def layer(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        ids, order = topk_ids.reshape(-1).to(torch.int16).sort()
        ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
        rows = hidden_states[order // request.top_k]
        rows = activate(functional.grouped_mm(rows, w13, offs=ends))
        rows = functional.grouped_mm(rows, w2, offs=ends)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device)
        return add_up(rows, places, topk_weights)  # type: ignore[no-any-return]

    return layer
