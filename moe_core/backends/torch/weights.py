"""Preparation for the torch runners: weights as they are stored, scales that a whole row shares as output scales."""

from __future__ import annotations

from moe_core.kernels.scale_tensors import scale_tensors
from moe_core.payloads import PreparedTensor, PreparedWeights, RawWeights, Tensor
from moe_core.plan import MoEPlan
from moe_core.quant import QuantScheme
from moe_core.vocabulary import CANONICAL


def prepare(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Borrow the raw tensors, or copy them into the storage of an earlier preparation.

    What is computed from raw tensors is a prepared tensor too, so that a reload refreshes it.
    """
    raw, quant = weights.tensors, plan.request.local_quant
    interleaved = plan.request.activation.row_order == "interleaved"
    tensors = {
        **_projection("w13", quant.w13, raw, interleaved),
        **_projection("w2", quant.w2, raw, interleaved=False),
        **{name: PreparedTensor(data=raw[name], owned=False) for name in raw if name.startswith("b")},
    }
    if out is None:
        return PreparedWeights(
            layout=CANONICAL,
            tensors=tensors,
            activation=weights.activation,
            post_norm=weights.post_norm,
        )
    for name, tensor in tensors.items():
        out[name].copy_(tensor.data)
    out.activation, out.post_norm = weights.activation, weights.post_norm
    if weights.release is not None:
        for expert in range(raw["w13"].shape[0]):
            weights.release(expert)
    return out


def _projection(name: str, scheme: QuantScheme, raw: dict[str, Tensor], interleaved: bool) -> dict[str, PreparedTensor]:
    """What `StoredLinear` and its rounder need of one projection."""
    prepared = {name: PreparedTensor(data=raw[name], owned=False)}
    for word, data in scale_tensors(name, scheme, raw, interleaved=interleaved).items():
        computed = word == "output_scale" or scheme.scales_whole_rows
        prepared[f"{name}_{word}"] = PreparedTensor(data=data, owned=computed)
    if (input_scale := raw.get(f"{name}_input_scale")) is not None:
        prepared[f"{name}_input_scale"] = PreparedTensor(data=input_scale, owned=False)
    return prepared
