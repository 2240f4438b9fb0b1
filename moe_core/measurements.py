"""Measured times of combinations, which rank before any declared tier."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from moe_core.environment import Environment
from moe_core.errors import SpecError
from moe_core.request import LayerRequest
from moe_core.specs import Candidate
from moe_core.vocabulary import as_tuple, at_least, instance_of, tuple_of


def _is_time(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise SpecError(f"Measurement, field 'microseconds': expected a finite number > 0, got {value!r}")


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
    """

    candidate: str = attrs.field(validator=instance_of(str))
    arch: str = attrs.field(validator=instance_of(str))
    shape: str = attrs.field(validator=instance_of(str))
    num_tokens: int = attrs.field(validator=at_least(1))
    microseconds: float = attrs.field(validator=_is_time)
    source: str = attrs.field(validator=instance_of(str))


def shape_key(request: LayerRequest) -> str:
    """What two layers must share for one's measurements to rank the other's candidates."""
    return (
        f"E{request.num_experts} K{request.top_k} H{request.hidden_size} I{request.local_intermediate_size} "
        f"ep{request.ep_size} {request.quant.label} {request.dtype} {request.activation}"
    )


@attrs.frozen
class MeasurementTable:
    """A set of measurements; lookups never leave the measured range of token counts."""

    rows: tuple[Measurement, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(Measurement))

    def lookup(
        self, request: LayerRequest, environment: Environment, candidate: Candidate, num_tokens: int | None
    ) -> tuple[float, str] | None:
        """Microseconds and provenance (`exact` or `nearest`), or None where nothing comparable was measured.

        Nearest means the measured token count closest by ratio; counts outside the measured range have none.
        """
        if num_tokens is None or not self.rows:
            return None
        arch, shape = environment.arch or environment.device_type, shape_key(request)
        near = [row for row in self.rows if (row.candidate, row.arch, row.shape) == (candidate.full_name, arch, shape)]
        if not near:
            return None
        counts = [row.num_tokens for row in near]
        if not min(counts) <= num_tokens <= max(counts):
            return None

        # Equally near, or measured twice: the larger count, then the slower time, whatever the order of the rows.
        def nearness(row: Measurement) -> tuple[float, int, float, str]:
            return abs(math.log(row.num_tokens / num_tokens)), -row.num_tokens, -row.microseconds, row.source

        row = min(near, key=nearness)
        kind = "exact" if row.num_tokens == num_tokens else f"nearest, T={row.num_tokens} for {num_tokens}"
        return row.microseconds, f"measured {row.microseconds:g} us ({kind}; {row.source})"

    @classmethod
    def from_rows(cls, rows: Iterable[dict[str, Any]], source: str) -> MeasurementTable:
        """Read plain rows; raises `SpecError` naming the row that is wrong."""
        measurements = []
        for index, row in enumerate(rows):
            try:
                measurements.append(Measurement(**row))
            except (TypeError, SpecError) as error:
                raise SpecError(f"measurements {source}, row {index}: {error}") from error
        return cls(measurements)

    @classmethod
    def load(cls, path: Path) -> MeasurementTable:
        """Read a JSON list of rows; raises `SpecError` naming the file if it is none."""
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SpecError(f"measurements {path}: cannot be read ({error})") from error
        if not isinstance(rows, list):
            raise SpecError(f"measurements {path}: expected a JSON list of rows, got {type(rows).__name__}")
        return cls.from_rows(rows, source=str(path))
