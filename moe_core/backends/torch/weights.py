"""Preparation for the torch runners: weights as they are stored, global scales as one factor per output row."""

from __future__ import annotations

import torch

from moe_core.payloads import PreparedTensor, PreparedWeights, RawWeights, Tensor
from moe_core.plan import MoEPlan


def prepare(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Borrow the raw tensors, or copy them into the storage of an earlier preparation.

    What is computed from raw tensors is a prepared tensor too, so that a reload refreshes it.
    """
    interleaved = plan.request.activation.row_order == "interleaved"
    tensors = _prepared(weights.tensors, interleaved)
    if out is None:
        return PreparedWeights(
            layout=plan.weight_layout,
            tensors=tensors,
            activation=weights.activation,
            post_norm=weights.post_norm,
        )
    for name, tensor in tensors.items():
        out[name].copy_(tensor.data)
    out.activation, out.post_norm = weights.activation, weights.post_norm
    if weights.release is not None:
        for expert in range(weights.tensors["w13"].shape[0]):
            weights.release(expert)
    return out


def _prepared(raw: dict[str, Tensor], interleaved: bool) -> dict[str, PreparedTensor]:
    prepared = {}
    for name, tensor in raw.items():
        projection = name.partition("_")[0]
        if name.endswith("_global_scale"):
            rows = _row_scale(tensor, raw[projection].shape[1], interleaved)
            prepared[f"{projection}_row_scale"] = PreparedTensor(data=rows)
        elif name.endswith("_input_scale"):
            # One scale for all experts: a token is rounded once, before it is known which expert reads it.
            prepared[name] = PreparedTensor(data=tensor.max(), expert_axis=None)
        else:
            # Exponent bytes come in two dtypes; one of them here, or a reload with the other would convert numbers.
            data = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor
            prepared[name] = PreparedTensor(data=data, owned=False)
    return prepared


def _row_scale(global_scale: Tensor, num_rows: int, interleaved: bool) -> Tensor:
    """`[L]` or `[L, 2]` (gate, up) -> `[L, num_rows]`: gate and up each keep their own scale."""
    halves = global_scale.reshape(global_scale.shape[0], -1)
    times = num_rows // halves.shape[1]
    return halves.repeat(1, times) if interleaved else halves.repeat_interleave(times, dim=1)
