"""Preparation for the torch runners: weights as they are stored, scales that a whole row shares as output scales."""

from __future__ import annotations

import torch

from moe_core.backends.torch.plugin import WEIGHT_LAYOUT
from moe_core.kernels.number_formats import scale_values
from moe_core.payloads import PreparedTensor, PreparedWeights, RawWeights, Tensor
from moe_core.plan import MoEPlan
from moe_core.quant import WHOLE, QuantScheme


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
            layout=WEIGHT_LAYOUT,
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
    num_rows = raw[name].shape[1]
    whole_rows = scheme.weight_block in ((1, WHOLE), (WHOLE, WHOLE))
    prepared = {name: PreparedTensor(data=raw[name], owned=False)}
    scale, zero_point = raw.get(f"{name}_scale"), raw.get(f"{name}_zero_point")
    shared = [raw.get(f"{name}_global_scale"), scale if whole_rows else None]
    factors = [_by_row(scale_values(factor), num_rows, interleaved) for factor in shared if factor is not None]
    if factors:
        prepared[f"{name}_output_scale"] = PreparedTensor(data=torch.stack(factors).prod(0))
    if scale is not None and not whole_rows:
        # Exponent bytes come in two dtypes; one of them here, or a reload with the other would convert numbers.
        data = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
        prepared[f"{name}_scale"] = PreparedTensor(data=data, owned=False)
    if zero_point is not None:
        data = _by_row(zero_point, num_rows, interleaved)[..., None] if whole_rows else zero_point
        prepared[f"{name}_zero_point"] = PreparedTensor(data=data, owned=whole_rows)
    if (input_scale := raw.get(f"{name}_input_scale")) is not None:
        # One scale for all experts: a token is rounded once, before it is known which expert reads it.
        prepared[f"{name}_input_scale"] = PreparedTensor(data=input_scale.max(), expert_axis=None)
    return prepared


def _by_row(stored: Tensor, num_rows: int, interleaved: bool) -> Tensor:
    """`[L]`, `[L, 1]`, `[L, 2]` (gate, up) or `[L, num_rows]` -> `[L, num_rows]`: gate and up each keep their own."""
    halves = stored.reshape(stored.shape[0], -1)
    times = num_rows // halves.shape[1]
    return halves.repeat(1, times) if interleaved else halves.repeat_interleave(times, dim=1)
