"""Measured times of combinations, which rank before any declared tier."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from moe_core.declared import Candidate
from moe_core.environment import Environment
from moe_core.errors import SpecError
from moe_core.request import LayerRequest
from moe_core.vocabulary import as_tuple, at_least, instance_of, tuple_of

#: Rows per expert, were tokens spread evenly, from which every expert's GEMMs are bound by arithmetic: times grow in
#: proportion to the tokens from there, so that the order at the largest measured count holds for more.
SATURATED_ROWS = 128
#: Largest ratio of the token counts of two times that are compared.
COMPARABLE = 2


def _is_time(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not _is_positive(value):
        raise SpecError(f"Measurement, field 'microseconds': expected a finite number > 0, got {value!r}")


def _are_bounds(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is None:
        return
    if not (isinstance(value, tuple) and len(value) == 2 and all(map(_is_positive, value)) and value[0] <= value[1]):
        raise SpecError(f"Measurement, field 'bounds': expected (low, high) with 0 < low <= high, got {value!r}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


class Time(NamedTuple):
    """How long one forward takes.

    Attributes:
        microseconds: The median of the samples.
        bounds: Microseconds between which the median of more samples would lie, as far as those that were taken tell;
            None where they are not known, or are one.
    """

    microseconds: float
    bounds: tuple[float, float] | None = None


@attrs.frozen(kw_only=True)
class Measurement:
    """One timed combination on one shape.

    Attributes:
        candidate: `Candidate.full_name` of what ran.
        arch: Device generation, or device type where there is none.
        shape: `shape_key` of the layer.
        num_tokens: T of this rank.
        microseconds: Median time of one layer forward.
        source: Card, versions, date and script, for the decision's text.
        bounds: As of `Time`.
    """

    candidate: str = attrs.field(validator=instance_of(str))
    arch: str = attrs.field(validator=instance_of(str))
    shape: str = attrs.field(validator=instance_of(str))
    num_tokens: int = attrs.field(validator=at_least(1))
    microseconds: float = attrs.field(validator=_is_time)
    source: str = attrs.field(validator=instance_of(str))
    bounds: tuple[float, float] | None = attrs.field(default=None, validator=_are_bounds)


class MeasuredTime(NamedTuple):
    """A measured time that speaks for a token count: of how many tokens it is, and where it is from."""

    microseconds: float
    num_tokens: int
    provenance: str
    bounds: tuple[float, float] | None = None

    def is_comparable(self, other: MeasuredTime) -> bool:
        """Whether the two are of about as many tokens: times that are not cannot tell which combination is faster."""
        return max(self.num_tokens, other.num_tokens) <= COMPARABLE * min(self.num_tokens, other.num_tokens)


def shape_key(request: LayerRequest) -> str:
    """What two layers must share for one's measurements to rank the other's candidates."""
    return (
        f"E{request.num_experts} K{request.top_k} H{request.hidden_size} I{request.local_intermediate_size} "
        f"ep{request.ep_size} {request.quant.label} {request.dtype} {request.activation}"
    )


def is_saturated(request: LayerRequest, num_tokens: int) -> bool:
    """Whether more than `num_tokens` tokens take time in proportion to their number; see `SATURATED_ROWS`."""
    return num_tokens * request.top_k >= SATURATED_ROWS * request.num_experts


@attrs.frozen
class MeasurementTable:
    """A set of measurements.

    Attributes:
        rows: What was measured.
        origins: Where the rows are from and what was left out and why, as lines for people.
    """

    rows: tuple[Measurement, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(Measurement))
    origins: tuple[str, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(str), eq=False)

    @functools.cached_property
    def _rows_of(self) -> Mapping[tuple[str, str], dict[str, list[Measurement]]]:
        """(Arch, shape) -> candidate -> its rows."""
        found: dict[tuple[str, str], dict[str, list[Measurement]]] = {}
        for row in self.rows:
            found.setdefault((row.arch, row.shape), {}).setdefault(row.candidate, []).append(row)
        return found

    def of_layer(self, request: LayerRequest, environment: Environment) -> Mapping[str, list[Measurement]]:
        """Candidate's full name -> its rows for this layer's shape on this device generation."""
        if not self.rows:
            return {}
        return self._rows_of.get((environment.arch or environment.device_type, shape_key(request)), {})

    def over(self, other: MeasurementTable) -> MeasurementTable:
        """These rows, and the other's of shapes that these leave out: times of two machines are never compared."""
        if not (self.rows or self.origins):
            # What it has prepared for look-ups is kept.
            return other
        own = {(row.arch, row.shape) for row in self.rows}
        added = [row for row in other.rows if (row.arch, row.shape) not in own]
        return MeasurementTable((*self.rows, *added), (*self.origins, *other.origins))

    def without(self, runners: Iterable[str], because: str) -> MeasurementTable:
        """The rows of other runners than these, which are full names; origins tell of which there were any, and why."""
        unwanted = set(runners)
        rows = [row for row in self.rows if _runner(row) not in unwanted]
        left_out = sorted({_runner(row) for row in self.rows} & unwanted)
        lines = [f"left out: times of {', '.join(left_out)}, {because}"] if left_out else []
        return MeasurementTable(rows, (*self.origins, *lines))

    def about(self, request: LayerRequest, environment: Environment) -> tuple[str, ...]:
        """What there is for one layer, as lines for people; empty where nobody looked for measurements."""
        counts = [row.num_tokens for rows in self.of_layer(request, environment).values() for row in rows]
        if counts:
            return (*self.origins, f"this layer was measured at T={min(counts)} to {max(counts)}")
        return (*self.origins, f"this layer was not measured: {shape_key(request)}") if self.rows else self.origins


def times_at(
    rows: Mapping[str, Sequence[Measurement]],
    request: LayerRequest,
    candidates: Iterable[Candidate],
    num_tokens: int | None,
) -> list[MeasuredTime | None]:
    """Of a layer's rows, as `of_layer` gives them, for each candidate the one that speaks for a token count, or None.

    Nearest means the measured token count closest by ratio. Counts outside the measured range have none, but for those
    above a count that saturates the experts (`SATURATED_ROWS`).
    """
    if num_tokens is None or not rows:
        return [None for _ in candidates]
    return [_speaking(rows.get(candidate.full_name, ()), request, num_tokens) for candidate in candidates]


def _runner(row: Measurement) -> str:
    """Full name of the runner that was timed."""
    return row.candidate.rpartition(" + ")[2]


def _speaking(rows: Sequence[Measurement], request: LayerRequest, num_tokens: int) -> MeasuredTime | None:
    counts = [row.num_tokens for row in rows]
    if not counts or num_tokens < min(counts):
        return None
    if num_tokens > max(counts) and not is_saturated(request, max(counts)):
        return None

    # Equally near, or measured twice: the larger count, then the slower time, whatever the order of the rows.
    def nearness(row: Measurement) -> tuple[float, int, float, str]:
        return abs(math.log(row.num_tokens / num_tokens)), -row.num_tokens, -row.microseconds, row.source

    # Of exact ones there is mostly one, and no ratio has to be found.
    exact = [row for row in rows if row.num_tokens == num_tokens]
    row = min(exact or rows, key=nearness)
    is_exact = row.num_tokens == num_tokens
    kind = f"exact, T={num_tokens}" if is_exact else f"nearest, T={row.num_tokens} for {num_tokens}"
    provenance = f"measured {row.microseconds:g} us ({kind}; {row.source})"
    return MeasuredTime(row.microseconds, row.num_tokens, provenance, row.bounds)
