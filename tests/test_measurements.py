from __future__ import annotations

from itertools import permutations
from typing import Any

import attrs
import pytest
from fakes import CPU, SM90, dispatcher, request, runner
from hypothesis import given
from hypothesis import strategies as st

from moe_core.declared import Candidate, DeclaredDispatcher, DeclaredRunner
from moe_core.environment import Environment
from moe_core.errors import SpecError
from moe_core.measurements import MeasuredTime, Measurement, MeasurementTable, shape_key, times_at

PAIR = Candidate(DeclaredDispatcher("toy", dispatcher()), DeclaredRunner("toy", runner()))
ROW = Measurement(
    candidate=PAIR.full_name, arch="sm90", shape=shape_key(request()), num_tokens=64, microseconds=8.0, source="bench"
)


def _at(*rows: tuple[int, float]) -> list[Measurement]:
    return [attrs.evolve(ROW, num_tokens=tokens, microseconds=time) for tokens, time in rows]


def _time(table: MeasurementTable, num_tokens: int | None, machine: Environment = SM90) -> MeasuredTime | None:
    (time,) = times_at(table.of_layer(request(), machine), request(), [PAIR], num_tokens)
    return time


@pytest.mark.parametrize(
    ("rows", "num_tokens", "found"),
    [
        ([(64, 8.0)], 64, (8.0, "measured 8 us (exact, T=64; bench)")),
        ([(16, 4.0), (64, 8.0)], 24, (4.0, "measured 4 us (nearest, T=16 for 24; bench)")),
        ([(16, 4.0), (64, 8.0)], 40, (8.0, "measured 8 us (nearest, T=64 for 40; bench)")),
        ([(16, 4.0), (64, 8.0)], 32, (8.0, "measured 8 us (nearest, T=64 for 32; bench)")),
        ([(64, 8.0), (64, 9.0)], 64, (9.0, "measured 9 us (exact, T=64; bench)")),
        ([(16, 4.0), (64, 8.0)], 15, None),
        ([(16, 4.0), (64, 8.0)], 65, None),
        ([(64, 8.0)], None, None),
        ([], 64, None),
    ],
)
def test_lookup(rows: list[tuple[int, float]], num_tokens: int | None, found: tuple[float, str] | None) -> None:
    for ordered in permutations(_at(*rows)):
        row = _time(MeasurementTable(ordered), num_tokens)
        assert (row and (row.microseconds, row.provenance)) == found


@given(st.sets(st.integers(1, 1000), min_size=1), st.integers(1, 1100))
def test_never_outside_the_measured_range(counts: set[int], num_tokens: int) -> None:
    table = MeasurementTable(_at(*((count, float(count)) for count in counts)))
    found = _time(table, num_tokens)
    assert (found is not None) is (min(counts) <= num_tokens <= max(counts))
    if found and num_tokens in counts:
        assert found[:2] == (num_tokens, num_tokens)
        assert found.provenance == f"measured {float(num_tokens):g} us (exact, T={num_tokens}; bench)"


@pytest.mark.parametrize(
    "change",
    [{"arch": "sm100"}, {"shape": shape_key(request(top_k=4))}, {"candidate": "other"}],
    ids=["device", "shape", "candidate"],
)
def test_only_what_is_comparable_counts(change: dict[str, Any]) -> None:
    table = MeasurementTable([attrs.evolve(ROW, **change)])
    assert _time(table, 64) is None


def test_a_device_without_generations_is_named_by_its_type() -> None:
    table = MeasurementTable([attrs.evolve(ROW, arch="cpu")])
    assert _time(table, 64, CPU) is not None


@pytest.mark.parametrize(("largest", "found"), [(1023, None), (1024, 9.0)])
def test_a_count_that_saturates_the_experts_speaks_for_more(largest: int, found: float | None) -> None:
    # 64 experts and top-8: 1024 tokens are 128 rows for each expert.
    table = MeasurementTable(_at((64, 8.0), (largest, 9.0)))
    time = _time(table, 100_000)
    assert (time and time.microseconds) == found
    if time:
        assert time.provenance == "measured 9 us (nearest, T=1024 for 100000; bench)"


def test_a_table_over_another_hides_its_shapes_whole() -> None:
    other_shape = shape_key(request(top_k=4))
    below = [attrs.evolve(ROW, num_tokens=128), attrs.evolve(ROW, shape=other_shape), attrs.evolve(ROW, arch="cpu")]
    table = MeasurementTable([ROW], ["mine"]).over(MeasurementTable(below, ["theirs"]))
    assert table.rows == (ROW, *below[1:])
    assert table.origins == ("mine", "theirs")


def test_what_a_table_says_about_a_layer() -> None:
    table = MeasurementTable(_at((16, 1.0), (64, 2.0)), ["mine"])
    assert table.about(request(), SM90) == ("mine", "this layer was measured at T=16 to 64")
    assert table.about(request(), CPU) == ("mine", f"this layer was not measured: {shape_key(request())}")
    assert MeasurementTable().about(request(), SM90) == ()


@pytest.mark.error_path
@pytest.mark.parametrize("change", [{"microseconds": -1}, {"microseconds": True}, {"num_tokens": 0}, {"source": None}])
def test_a_wrong_row_names_the_field(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"Measurement, field '{next(iter(change))}'"):
        attrs.evolve(ROW, **change)
