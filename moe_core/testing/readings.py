"""Known misreadings of a layer: what else a backend may have computed, so that a failure can name its likely cause."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import attrs
import torch

from moe_core.activation import ACTIVATION_KINDS, ActivationSpec
from moe_core.payloads import Tensor
from moe_core.quant import QuantScheme
from moe_core.testing.meaning import ReadFn, stored_values
from moe_core.testing.reference import ReferenceLayer
from moe_core.testing.rounding import activation_rounder
from moe_core.testing.stored import DrawnLayer

#: A layer in float64: `[T, H]`, `[T, K]`, `[T, K]` -> `[T, H]`.
ReferenceFn: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


@attrs.frozen
class Reading:
    """Another layer that a backend may have computed: a name for the message, and the layer."""

    name: str
    layer: ReferenceFn


def readings(stored: DrawnLayer) -> Iterator[Reading]:
    """Known misreadings of a layer, the likeliest first; each is made when it is asked for."""
    yield from _of_the_activation(stored.reference)
    yield from _of_router_weights(stored.reference)
    yield from _of_what_is_added(stored.reference)
    yield from _of_ids(stored.reference)
    yield from _of_stored_values(stored)
    yield from _of_memory(stored.reference)


def _of_the_activation(reference: ReferenceLayer) -> Iterator[Reading]:
    activation = reference.activation
    if reference.module is not None:
        return
    if activation.gated:
        b13 = None if reference.b13 is None else _swapped(reference.b13, activation.row_order)
        swapped = attrs.evolve(reference, w13=_swapped(reference.w13, activation.row_order), b13=b13)
        yield Reading("the gate and up rows of w13 are swapped", swapped)
        other = "gate_up" if activation.row_order == "interleaved" else "interleaved"
        mixed = attrs.evolve(activation, row_order=other)
        yield Reading(f"w13 is read as {other} rows", attrs.evolve(reference, activation=mixed))
        bare = attrs.evolve(activation, alpha=1.0, limit=None, beta=0.0, clamp="before")
        if bare != activation:
            yield Reading("alpha, limit and beta are ignored", attrs.evolve(reference, activation=bare))
    for kind in ACTIVATION_KINDS:
        if kind not in (activation.kind, "module"):
            # Parameters that this kind does not have are left out.
            plain = ActivationSpec(kind=kind, gated=activation.gated, row_order=activation.row_order)
            name = f"the activation is {kind} instead of {activation.kind}"
            yield Reading(name, attrs.evolve(reference, activation=plain))


def _swapped(tensor: Tensor, row_order: str) -> Tensor:
    """`w13` or `b13` with gate and up rows exchanged."""
    rows = torch.arange(tensor.shape[1])
    other = rows ^ 1 if row_order == "interleaved" else rows.roll(len(rows) // 2)
    return tensor[:, other]


def _of_router_weights(reference: ReferenceLayer) -> Iterator[Reading]:
    yield Reading("the router weights are not applied", attrs.evolve(reference, weighting=lambda weight: 1.0))
    yield Reading("the router weights are applied twice", attrs.evolve(reference, weighting=lambda weight: weight**2))
    yield Reading("the router weights are scaled to sum to one", _normalized(reference))
    other_side = attrs.evolve(reference, weight_on_input=not reference.weight_on_input)
    side = "output" if reference.weight_on_input else "input"
    yield Reading(f"the router weight is applied to the {side}", other_side)


def _normalized(reference: ReferenceLayer) -> ReferenceFn:
    return lambda x, ids, weights: reference(x, ids, weights / (weights * (ids >= 0)).sum(1, keepdim=True).clamp(1e-9))


def _of_what_is_added(reference: ReferenceLayer) -> Iterator[Reading]:
    if reference.b13 is not None and reference.b2 is not None:
        yield Reading("the biases are ignored", attrs.evolve(reference, b13=None, b2=None))
        yield Reading("the bias b13 is ignored", attrs.evolve(reference, b13=None))
        yield Reading("the bias b2 is ignored", attrs.evolve(reference, b2=None))
        yield Reading("the bias b2 is added without the router weight", _unweighted_bias(reference, reference.b2))
    if reference.post_norm is not None:
        yield Reading("the norm after each expert is left out", attrs.evolve(reference, post_norm=None))


def _unweighted_bias(reference: ReferenceLayer, bias: Tensor) -> ReferenceFn:
    without = attrs.evolve(reference, b2=None)

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        chosen = ids.cpu()
        return without(x, ids, weights) + (bias[chosen.clamp(0)] * (chosen >= 0)[..., None]).sum(1)

    return layer


def _of_ids(reference: ReferenceLayer) -> Iterator[Reading]:
    yield Reading("-1 is read as the last expert", _last_expert(reference))
    yield Reading("an expert that occurs twice in a row counts once", _without_repetition(reference))


def _last_expert(reference: ReferenceLayer) -> ReferenceFn:
    last = reference.w13.shape[0] - 1
    return lambda x, ids, weights: reference(x, torch.where(ids < 0, last, ids), weights)


def _without_repetition(reference: ReferenceLayer) -> ReferenceFn:
    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        earlier = torch.tril(ids[:, :, None] == ids[:, None, :], diagonal=-1).any(dim=-1)
        return reference(x, torch.where(earlier, -1, ids), weights)

    return layer


def _of_stored_values(stored: DrawnLayer) -> Iterator[Reading]:
    """Codes, scales and zero points of quantized weights, taken for something else."""
    schemes = (stored.quant.w13, stored.quant.w2)
    if any(scheme.is_quantized for scheme in schemes):
        inverted = stored.reread(functools.partial(stored_values, read_scale=torch.reciprocal))
        yield Reading("the weight scales divide instead of multiplying", inverted)
        left_out = stored.reread(functools.partial(stored_values, read_scale=torch.ones_like))
        yield Reading("the weight scales are left out", left_out)
    if any(scheme.weight_bits == 4 for scheme in schemes):
        yield Reading("two values of a byte are read in the other order", stored.reread(_other_nibble_first))
    if any(scheme.zero_point is True for scheme in schemes):
        yield Reading("the zero points are ignored", stored.reread(_without("zero_point")))
    if any(scheme.global_scale is True for scheme in schemes):
        yield Reading("the global scales are ignored", stored.reread(_without("global_scale")))
    if stored.has_input_scales:
        yield Reading("the first expert's activation scale is used for all", _one_input_scale(stored))


def _other_nibble_first(
    name: str, tensors: dict[str, Tensor], scheme: QuantScheme, activation: ActivationSpec
) -> Tensor:
    codes = tensors[name]
    turned = (codes >> 4) | (codes << 4) if scheme.weight_bits == 4 else codes
    return stored_values(name, tensors | {name: turned}, scheme, activation)


def _without(word: str) -> ReadFn:
    def values(name: str, tensors: dict[str, Tensor], scheme: QuantScheme, activation: ActivationSpec) -> Tensor:
        kept = {key: tensor for key, tensor in tensors.items() if key != f"{name}_{word}"}
        return stored_values(name, kept, scheme, activation)

    return values


def _one_input_scale(stored: DrawnLayer) -> ReferenceLayer:
    first = {
        name: None if scale is None else scale[:1].expand(len(scale))
        for name, scale in ((name, stored.tensors.get(f"{name}_input_scale")) for name in ("w13", "w2"))
    }
    return attrs.evolve(
        stored.reference,
        round1=activation_rounder(stored.quant.w13, first["w13"]),
        round2=activation_rounder(stored.quant.w2, first["w2"]),
    )


def _of_memory(reference: ReferenceLayer) -> Iterator[Reading]:
    """Matrices that lie one way and are read the other: `[.., N, K]` as if it were `[.., K, N]`."""
    w13, w2 = _transposed(reference.w13), _transposed(reference.w2)
    yield Reading("w13 and w2 are read as transposed", attrs.evolve(reference, w13=w13, w2=w2))
    yield Reading("w13 is read as transposed", attrs.evolve(reference, w13=w13))
    yield Reading("w2 is read as transposed", attrs.evolve(reference, w2=w2))


def _transposed(matrices: Tensor) -> Tensor:
    experts, rows, columns = matrices.shape
    return matrices.reshape(experts, columns, rows).mT
