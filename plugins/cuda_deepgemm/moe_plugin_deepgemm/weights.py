"""From canonical weights to what DeepGEMM reads: the same tensors wherever it can read them where they are."""

from __future__ import annotations

import attrs
import torch

from moe_core.backends.torch import weights as canonical
from moe_core.payloads import PreparedTensor, PreparedWeights, RawWeights, Tensor
from moe_core.plan import MoEPlan
from moe_plugin_deepgemm.packed_scales import pack_block_scales
from moe_plugin_deepgemm.runner_specs import UE8M0

#: Bytes in which the library's bulk copies count.
_ALIGNMENT = 16


def is_readable(tensor: Tensor) -> bool:
    """Whether the library can read a tensor where it is: row by row, without gaps, from a multiple of 16 bytes on."""
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


def prepare(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Borrow the raw weights, or copy them, expert by expert, where one of them is not readable; refill `out`.

    For Blackwell the scales are packed besides, which is a copy of them alone.
    """
    if out is None and not all(map(is_readable, weights.tensors.values())):
        prepared = _owned(canonical.prepare(plan, _copied(weights), None))
    elif out is None:
        prepared = canonical.prepare(plan, weights, None)
    else:
        return _refilled(plan, weights, out)
    return _packed(prepared) if plan.weight_layout == UE8M0 else prepared


def _copied(weights: RawWeights) -> RawWeights:
    """The same weights in memory of their own; each expert's raw memory is given back once it was read."""
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for name, tensor in weights.tensors.items()
    }
    for expert in range(weights.tensors["w13"].shape[0]):
        for name, copy in copies.items():
            copy[expert].copy_(weights.tensors[name][expert])
        if weights.release is not None:
            weights.release(expert)
    return attrs.evolve(weights, tensors=copies, release=None)


def _owned(prepared: PreparedWeights) -> PreparedWeights:
    tensors = {name: attrs.evolve(tensor, owned=True) for name, tensor in prepared.tensors.items()}
    return attrs.evolve(prepared, tensors=tensors)


def _packed(prepared: PreparedWeights) -> PreparedWeights:
    """With packed scales in place of the stored ones."""
    tensors = dict(prepared.tensors)
    for name in ("w13", "w2"):
        scales = pack_block_scales(prepared[f"{name}_scale"], prepared[name].shape[1])
        tensors[f"{name}_scale"] = PreparedTensor(data=scales)
    return attrs.evolve(prepared, layout=UE8M0, tensors=tensors)


def _refilled(plan: MoEPlan, weights: RawWeights, out: PreparedWeights) -> PreparedWeights:
    """A reload into the memory of an earlier preparation."""
    if plan.weight_layout != UE8M0:
        return canonical.prepare(plan, weights, out)
    fresh = _packed(canonical.prepare(plan, attrs.evolve(weights, release=None), None))
    for name, tensor in fresh.tensors.items():
        out[name].copy_(tensor.data)
    out.activation, out.post_norm = weights.activation, weights.post_norm
    if weights.release is not None:
        for expert in range(weights.tensors["w13"].shape[0]):
            weights.release(expert)
    return out
