"""The right answer that is nearest to an output, where codes of rounded activations are in doubt.

A kernel may round the first GEMM's result and the activation to the layer's dtype, may add up in any order, and may
divide by a scale or multiply with its reciprocal. A value before the second GEMM is so known up to a *reach*: up to
four roundings of `u` each (`tolerance`), and in fp32 what sums and quotients add. For most values everything within
the reach has one code. Where the middle between two codes lies within it, the value is *in doubt*: right kernels take
either. A scale whose group has its largest value near such a middle leaves the group in doubt.

One step of one code is much more than all other roundings: of fp4 a third of the value, and of a token of some dozen
intermediate channels a tenth. A limit that allows it everywhere finds little, and one that does not fails right
kernels. But layer and tokens are known, and with them the few values in doubt, how far each may move, and its column
of `w2`. The outputs of right kernels lie in a box along these columns, `answer + sum of f_j W_j` with each `f_j`
within its value's step, up to the other roundings. So an output is compared with the nearest point of the box, and
the limits for the other roundings hold for what is left. Doubts of the tokens themselves (exact middles) shift values
before the second GEMM.

No limit grows with a step of a code, no number of values that "may" move is assumed, and no right kernel fails by
chance while its values are within the reach. What a fault adds goes unseen only as far as it lies along these columns
and within their steps.
"""

from __future__ import annotations

import math

import torch

from moe_core.payloads import Tensor
from moe_core.testing.reference import ReferenceLayer, Slots, by_expert

#: What fp32 adds: half a unit in the last place, for each of a scale, its reciprocal and two products.
_FP32 = 4 * 2.0**-24
#: Most steps of the search, and the part of a tolerance at which it stops.
_STEPS, _ENOUGH = 200, 0.25


def nearest_answer(
    reference: ReferenceLayer, tokens: tuple[Tensor, Tensor, Tensor], output: Tensor, tolerance: float
) -> Tensor:
    """The float64 answer `[T, H]` with every code in doubt as it fits the output best.

    Args:
        reference: The layer.
        tokens: What it is given: `[T, H]`, `[T, K]`, `[T, K]`.
        output: `[T, H]`, finite.
        tolerance: What the other roundings explain; a value before the second GEMM is known up to half of it.
    """
    answer, slots = reference(*tokens), reference.slots(*tokens)
    if not slots.source:
        return answer
    least, most = _in_doubt(reference, slots, tolerance)
    factors = _factors(reference, slots)
    apart = output.detach().cpu().double() - answer
    source, experts = torch.tensor(slots.source), torch.tensor(slots.experts)
    # How far each value may move the output: not at all where a router weight or a column of w2 is zero.
    lengths = (most - least) * factors.abs()[:, None] * reference.w2.norm(dim=1)[experts]
    for token in set(source[(lengths > 0).any(dim=1)].tolist()):
        slot, value = ((lengths > 0) & (source == token)[:, None]).nonzero(as_tuple=True)
        columns = (reference.w2[experts[slot], :, value] * factors[slot, None]).T
        enough = _ENOUGH * tolerance * float(answer[token].norm())
        answer[token] += _nearest(columns, least[slot, value], most[slot, value], apart[token], enough)
    return answer


def _nearest(columns: Tensor, lower: Tensor, upper: Tensor, target: Tensor, enough: float) -> Tensor:
    """The point `columns @ f`, `lower <= f <= upper`, nearest to `target`, or one that is `enough` near.

    `[H, n]`, `[n]`, `[n]`, `[H]` -> `[H]`; every `lower <= 0 <= upper`, and no two of them are equal.

    Accelerated projected gradients. Source: Beck and Teboulle, A Fast Iterative Shrinkage-Thresholding Algorithm for
    Linear Inverse Problems, 2009; to be cut off at a bound takes the place of the shrinkage.
    """
    # In units of what each may move by, so that one rate suits all.
    size = upper - lower
    columns, lower, upper = columns * size, lower / size, upper / size
    # The square of the largest singular value is at most this product of the largest sums.
    rate = 1.0 / float(columns.abs().sum(0).max() * columns.abs().sum(1).max())
    found = ahead = torch.zeros_like(lower)
    pace = 1.0
    for _ in range(_STEPS):
        if float((columns @ found - target).norm()) <= enough:
            break
        previous, previous_pace = found, pace
        found = (ahead - rate * (columns.T @ (columns @ ahead - target))).clamp(lower, upper)
        pace = (1.0 + math.sqrt(1.0 + 4.0 * pace**2)) / 2.0
        ahead = found + (previous_pace - 1.0) / pace * (found - previous)
    return columns @ found


def _factors(reference: ReferenceLayer, slots: Slots) -> Tensor:
    """What the router weight and the norm multiply each slot's row with, `[S]`."""
    factors = slots.weights[:, 0]
    if reference.weight_on_input:
        factors = torch.ones_like(factors)
    if reference.post_norm is None:
        return factors
    rows = reference.rows(slots)
    longer: Tensor = reference.post_norm(rows).norm(dim=1) / rows.norm(dim=1)
    return factors * longer.nan_to_num(1.0)


def _in_doubt(reference: ReferenceLayer, slots: Slots, tolerance: float) -> tuple[Tensor, Tensor]:
    """The least and the most by which each input of the second GEMM may move, `[S, I]`; zero for nearly all."""
    inputs, experts = reference.inputs(slots), slots.experts
    # Tokens are as they were given, unless a product with the router weight is rounded first.
    reach = inputs.abs() * (_FP32 + (tolerance / 2 if reference.weight_on_input else 0.0))
    down, up = reference.round1.doubts(inputs, experts, reach)
    h = by_expert(reference.round1(inputs, experts), reference.w13, reference.b13, experts)
    # What tokens in doubt do to `h`: as much as independent moves do on average.
    shifted = torch.zeros_like(h)
    if (up > down).any():
        shifted = by_expert((up - down).square(), reference.w13.square(), None, experts).sqrt()
    # What roundings do, and sums in another order.
    size = h.square().mean(1, keepdim=True).sqrt()
    off = h.abs() * tolerance / 2 + size * _FP32 * math.sqrt(inputs.shape[1])
    a = reference.activated(h)
    least, most = reference.round2.doubts(a, experts, _changes(reference, h, off + shifted) + a.abs() * _FP32)
    # Tokens in doubt move values that keep their codes as well.
    moved = _changes(reference, h, shifted)
    return least - moved, most + moved


def _changes(reference: ReferenceLayer, h: Tensor, off: Tensor) -> Tensor:
    """Largest change `[S, I]` of the activation of `h` when its values are `off`, gate and up either way."""
    right, same = reference.activated(h), torch.ones(h.shape[1], dtype=torch.float64)
    opposite = same.clone()
    if reference.activation.row_order == "interleaved":
        opposite[1::2] = -1.0
    else:
        opposite[len(opposite) // 2 :] = -1.0
    found = [(reference.activated(h + way * off) - right).abs() for way in (same, -same, opposite, -opposite)]
    return torch.stack(found).amax(0)
