"""Preparation for the torch runners: the canonical order is the one they read, whatever the strides."""

from __future__ import annotations

from moe_core.payloads import PreparedTensor, PreparedWeights, RawWeights
from moe_core.plan import MoEPlan


def prepare(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Borrow the raw tensors, or copy them into the storage of an earlier preparation."""
    if out is None:
        tensors = {name: PreparedTensor(data=tensor, owned=False) for name, tensor in weights.tensors.items()}
        return PreparedWeights(
            layout=plan.weight_layout,
            tensors=tensors,
            activation=weights.activation,
            post_norm=weights.post_norm,
        )
    for name, tensor in weights.tensors.items():
        out[name].copy_(tensor)
    return out
