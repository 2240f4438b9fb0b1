"""Measured times as tests write them down."""

from __future__ import annotations

from collections.abc import Mapping

from moe_core import LayerRequest
from moe_core.measurements import Measurement, MeasurementTable, Time, shape_key


def measured(
    layer: LayerRequest, times: Mapping[str, Mapping[int, float | Time]], *, arch: str = "cpu", source: str = "bench"
) -> MeasurementTable:
    """Times of a layer's shape: full name of a candidate -> tokens -> microseconds, with bounds or without."""
    return MeasurementTable(
        Measurement(
            candidate=candidate,
            arch=arch,
            shape=shape_key(layer),
            num_tokens=count,
            microseconds=time.microseconds if isinstance(time, Time) else float(time),
            source=source,
            bounds=time.bounds if isinstance(time, Time) else None,
        )
        for candidate, of_candidate in times.items()
        for count, time in of_candidate.items()
    )
