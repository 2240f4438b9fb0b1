"""Weights in panels: copies of the raw ones, in the order in which tiles of the GEMMs read them."""

from __future__ import annotations

import torch

from moe_core.backends.torch import weights as canonical
from moe_core.kernels.panels import fill_panels, new_panels
from moe_core.payloads import PreparedTensor, PreparedWeights, RawWeights, Tensor
from moe_core.plan import MoEPlan

_PROJECTIONS = ("w13", "w2")


def prepare(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Copy the raw weights expert by expert, so that two copies of a layer never exist; into `out` if it is given."""
    stored = canonical.prepare(plan, RawWeights(tensors=weights.tensors), None)
    if out is None:
        tensors = {name: PreparedTensor(data=_room(name, tensor.data)) for name, tensor in stored.tensors.items()}
        out = PreparedWeights(layout=plan.weight_layout, tensors=tensors)
    activation = plan.request.activation
    # A model's own callable wants the result of the first projection in the order that it has.
    in_halves = activation.gated and activation.row_order == "gate_up" and activation.kind != "module"
    for expert in range(weights.tensors["w13"].shape[0]):
        for name, tensor in stored.tensors.items():
            source, target = tensor.data[expert], out[name][expert]
            if name in _PROJECTIONS:
                fill_panels(target, source, in_halves=in_halves and name == "w13")
            else:
                target.copy_(source)
        if weights.release is not None:
            weights.release(expert)
    out.activation, out.post_norm = weights.activation, weights.post_norm
    return out


def _room(name: str, data: Tensor) -> Tensor:
    if name in _PROJECTIONS:
        return new_panels(data)
    return torch.empty_like(data, memory_format=torch.contiguous_format)
