"""Measured times as tests write them down."""

from __future__ import annotations

from collections.abc import Mapping

from moe_core import LayerRequest
from moe_core.measurements import Measurement, MeasurementTable, shape_key


def measured(
    layer: LayerRequest, times: Mapping[str, Mapping[int, float]], *, arch: str = "cpu", source: str = "bench"
) -> MeasurementTable:
    """Times of a layer's shape: full name of a candidate -> tokens -> microseconds."""
    return MeasurementTable(
        Measurement(
            candidate=candidate,
            arch=arch,
            shape=shape_key(layer),
            num_tokens=count,
            microseconds=float(time),
            source=source,
        )
        for candidate, of_candidate in times.items()
        for count, time in of_candidate.items()
    )
