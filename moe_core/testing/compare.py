"""Compare an output with the answer, token by token, and say which other reading of the layer it looks like.

`relative_error` and `mismatch` compare with one answer; `layer_error` and `layer_mismatch` with a layer, which has
several right answers where codes are in doubt.
"""

from __future__ import annotations

from moe_core.errors import some_of
from moe_core.payloads import Tensor
from moe_core.testing.doubts import nearest_answer
from moe_core.testing.outcome import ConformanceError, NotRun, require
from moe_core.testing.readings import Reading, ReferenceFn, readings
from moe_core.testing.reference import ReferenceLayer
from moe_core.testing.stored import DrawnLayer
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


def mismatch(got: Tensor, want: Tensor, tolerance: float) -> str | None:
    """How `got [T, H]` differs from the answer by more than rounding, in words; None where it does not.

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
    return some_of(flags.nonzero().flatten().tolist(), most=8)


def layer_mismatch(got: Tensor, layer: ReferenceFn, tokens: Tokens, tolerance: float) -> str | None:
    """How `got [T, H]` differs from the nearest right answer of a layer, in words; None where it does not.

    Args:
        got: The output.
        layer: The layer in float64; of a `ReferenceLayer` it is known which codes are in doubt.
        tokens: What was given.
        tolerance: See `mismatch`.
    """
    problem = mismatch(got, layer(*tokens), tolerance)
    is_comparable = got.shape == tokens[0].shape and bool(got.isfinite().all())
    if problem is None or not is_comparable or not isinstance(layer, ReferenceLayer):
        return problem
    return mismatch(got, nearest_answer(layer, tokens, got, tolerance), tolerance)


def layer_error(got: Tensor, layer: ReferenceLayer, tokens: Tokens, tolerance: float) -> float:
    """Relative error of the whole output `[T, H]` against the nearest right answer; NaN counts as infinite."""
    if not got.isfinite().all():
        return float("inf")
    return relative_error(got, nearest_answer(layer, tokens, got, tolerance))


def require_answer(got: Tensor, stored: DrawnLayer, tokens: Tokens, tolerance: float, what: str) -> None:
    """Raise `ConformanceError` unless `got` is the layer's answer; the text names the reading it equals instead.

    Args:
        got: The output `[T, H]`.
        stored: The layer.
        tokens: What was given.
        tolerance: See `mismatch`.
        what: What was tried, for the message.
    """
    problem = layer_mismatch(got, stored.reference, tokens, tolerance)
    if problem is None:
        return
    if tuple(got.shape) == tuple(tokens[0].shape):
        for reading in readings(stored):
            if layer_mismatch(got, reading.layer, tokens, tolerance) is None:
                problem += f"; it is what comes out if {reading.name}"
                break
    raise ConformanceError(f"{what}: {problem}")


def require_apart(stored: DrawnLayer, name: str, tokens: Tokens, tolerance: float) -> Reading:
    """The reading whose name contains `name`, after proof that on these tokens it differs from the answer.

    Raises:
        NotRun: This layer has no such reading.
        ConformanceError: The two are too near each other for this tolerance: the check would prove nothing.
    """
    for reading in readings(stored):
        if name in reading.name:
            distance = layer_error(reading.layer(*tokens), stored.reference, tokens, tolerance)
            apart = f"{distance:.2g} apart, the tolerance is {tolerance:.2g}"
            require(distance > APART * tolerance, f"this check proves nothing here: the two readings are {apart}")
            return reading
    raise NotRun(f"this layer cannot be misread so: {name}")
