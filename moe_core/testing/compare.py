"""Compare an output with the answer, token by token, and say which other reading of the layer it looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch

from moe_core.payloads import Tensor
from moe_core.testing.outcome import ConformanceError, NotRun, require
from moe_core.testing.reference import ReferenceLayer
from moe_core.testing.tolerance import SCATTER

#: A token shorter than this part of the average is judged by that length: its slots may cancel out.
_SHORT = 0.3
#: Two readings are told apart only if they differ by so many tolerances.
APART = 2.5

#: A forward's tensors.
Tokens = tuple[Tensor, Tensor, Tensor]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of the wanted; NaN and infinity count as infinite."""
    difference = float((got.double() - want).norm())
    scale = float(want.norm()) or 1.0
    return difference / scale if difference == difference else float("inf")


def problem_of(got: Tensor, want: Tensor, tolerance: float) -> str | None:
    """What is wrong with `got [T, H]`, or None.

    Args:
        got: The output, on any device and in any dtype.
        want: The float64 answer.
        tolerance: Largest relative error of the whole; single tokens and elements may scatter around it.
    """
    if got.shape != want.shape:
        return f"the output has shape {list(got.shape)}, expected {list(want.shape)}"
    values = got.detach().cpu().double()
    bad = ~values.isfinite()
    if bad.any() and want.isfinite().all():
        return f"NaN or infinity in tokens {_listed(bad.any(dim=1))}"
    empty = (want == 0).all(dim=1)
    if (values[empty] != 0).any():
        return f"tokens {_listed(empty & (values != 0).any(dim=1))} have no expert and must be zero"
    error = relative_error(values, want)
    if error > tolerance:
        return f"relative error {error:.2g}, at most {tolerance:.2g} is due to rounding"
    lengths = want.norm(dim=1)
    floor = _SHORT * float(lengths.square().mean().sqrt()) if len(lengths) else 0.0
    by_token = (values - want).norm(dim=1) / lengths.clamp(min=floor or 1.0)
    if (by_token > SCATTER * tolerance).any():
        return f"relative error {float(by_token.max()):.2g} in tokens {_listed(by_token > SCATTER * tolerance)}"
    size = lengths.clamp(min=floor or 1.0)[:, None] / want.shape[1] ** 0.5
    by_element = (values - want).abs() / size
    if (by_element > SCATTER**2 * tolerance).any():
        columns = (by_element > SCATTER**2 * tolerance).any(dim=0)
        return f"error {float(by_element.max()):.2g} of the average value in columns {_listed(columns)}"
    return None


def _listed(flags: Tensor) -> str:
    found = flags.nonzero().flatten().tolist()
    return ", ".join(map(str, found[:8])) + (" and more" if len(found) > 8 else "")


@attrs.frozen
class Reading:
    """Another layer that a backend may have computed: a name for the message, and the layer."""

    name: str
    layer: Callable[[Tensor, Tensor, Tensor], Tensor]


def readings(reference: ReferenceLayer) -> Iterator[Reading]:
    """Known misreadings of a layer, the likeliest first."""
    activation = reference.activation
    if activation.gated and reference.module is None:
        other = "gate_up" if activation.row_order == "interleaved" else "interleaved"
        plain = attrs.evolve(activation, row_order="gate_up")
        b13 = None if reference.b13 is None else _swapped(reference.b13, activation.row_order)
        swapped = attrs.evolve(reference, w13=_swapped(reference.w13, activation.row_order), b13=b13)
        yield Reading("the gate and up rows of w13 are swapped", swapped)
        mixed = attrs.evolve(activation, row_order=other)
        yield Reading(f"w13 is read as {other} rows", attrs.evolve(reference, activation=mixed))
        if plain != attrs.evolve(plain, alpha=1.0, limit=None, beta=0.0, clamp="before"):
            bare = attrs.evolve(activation, alpha=1.0, limit=None, beta=0.0, clamp="before")
            yield Reading("alpha, limit and beta are ignored", attrs.evolve(reference, activation=bare))
    yield Reading("the router weights are not applied", attrs.evolve(reference, weighting=lambda weight: 1.0))
    yield Reading("the router weights are applied twice", attrs.evolve(reference, weighting=lambda weight: weight**2))
    if reference.b13 is not None:
        without = attrs.evolve(reference, b13=None, b2=None)
        yield Reading("the biases are ignored", without)
    other_side = attrs.evolve(reference, weight_on_input=not reference.weight_on_input)
    side = "output" if reference.weight_on_input else "input"
    yield Reading(f"the router weight is applied to the {side}", other_side)
    if reference.post_norm is not None:
        yield Reading("the norm after each expert is left out", attrs.evolve(reference, post_norm=None))
    yield Reading("-1 is read as the last expert", _last_expert(reference))
    yield Reading("an expert that occurs twice in a row counts once", _without_repetition(reference))


def _swapped(tensor: Tensor, row_order: str) -> Tensor:
    """`w13` or `b13` with gate and up rows exchanged."""
    rows = torch.arange(tensor.shape[1])
    other = rows ^ 1 if row_order == "interleaved" else rows.roll(len(rows) // 2)
    return tensor[:, other]


def _last_expert(reference: ReferenceLayer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    last = reference.w13.shape[0] - 1
    return lambda x, ids, weights: reference(x, torch.where(ids < 0, last, ids), weights)


def _without_repetition(reference: ReferenceLayer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        earlier = torch.tril(ids[:, :, None] == ids[:, None, :], diagonal=-1).any(dim=-1)
        return reference(x, torch.where(earlier, -1, ids), weights)

    return layer


def require_answer(got: Tensor, reference: ReferenceLayer, tokens: Tokens, tolerance: float, what: str) -> None:
    """Raise `ConformanceError` unless `got` is the layer's answer; the text names the reading it equals instead.

    Args:
        got: The output `[T, H]`.
        reference: The layer.
        tokens: What was given.
        tolerance: See `problem_of`.
        what: What was tried, for the message.
    """
    problem = problem_of(got, reference(*tokens), tolerance)
    if problem is None:
        return
    if tuple(got.shape) == tuple(tokens[0].shape):
        for reading in readings(reference):
            if problem_of(got, reading.layer(*tokens), tolerance) is None:
                problem += f"; it is what comes out if {reading.name}"
                break
    raise ConformanceError(f"{what}: {problem}")


def require_apart(reference: ReferenceLayer, name: str, tokens: Tokens, tolerance: float) -> Reading:
    """The reading whose name contains `name`, after proof that on these tokens it differs from the answer.

    Raises:
        NotRun: This layer has no such reading.
        ConformanceError: The two are too near each other for this tolerance: the check would prove nothing.
    """
    for reading in readings(reference):
        if name in reading.name:
            distance = relative_error(reading.layer(*tokens), reference(*tokens))
            apart = f"{distance:.2g} apart, the tolerance is {tolerance:.2g}"
            require(distance > APART * tolerance, f"this check proves nothing here: the two readings are {apart}")
            return reading
    raise NotRun(f"this layer cannot be misread so: {name}")
