from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import attrs
import pytest
from fakes import CPU, SM90, dispatcher, request, runner
from hypothesis import given
from hypothesis import strategies as st

from moe_core.errors import SpecError
from moe_core.measurements import Measurement, MeasurementTable, shape_key
from moe_core.specs import Candidate, DeclaredDispatcher, DeclaredRunner

PAIR = Candidate(DeclaredDispatcher("toy", dispatcher()), DeclaredRunner("toy", runner()))
ROW = Measurement(
    candidate=PAIR.full_name, arch="sm90", shape=shape_key(request()), num_tokens=64, microseconds=8.0, source="bench"
)


def _at(*rows: tuple[int, float]) -> list[Measurement]:
    return [attrs.evolve(ROW, num_tokens=tokens, microseconds=time) for tokens, time in rows]


@pytest.mark.parametrize(
    ("rows", "num_tokens", "found"),
    [
        ([(64, 8.0)], 64, (8.0, "measured 8 us (exact; bench)")),
        ([(16, 4.0), (64, 8.0)], 24, (4.0, "measured 4 us (nearest, T=16 for 24; bench)")),
        ([(16, 4.0), (64, 8.0)], 40, (8.0, "measured 8 us (nearest, T=64 for 40; bench)")),
        ([(16, 4.0), (64, 8.0)], 32, (8.0, "measured 8 us (nearest, T=64 for 32; bench)")),
        ([(64, 8.0), (64, 9.0)], 64, (9.0, "measured 9 us (exact; bench)")),
        ([(16, 4.0), (64, 8.0)], 15, None),
        ([(16, 4.0), (64, 8.0)], 65, None),
        ([(64, 8.0)], None, None),
        ([], 64, None),
    ],
)
def test_lookup(rows: list[tuple[int, float]], num_tokens: int | None, found: tuple[float, str] | None) -> None:
    for ordered in permutations(_at(*rows)):
        assert MeasurementTable(ordered).lookup(request(), SM90, PAIR, num_tokens) == found


@given(st.sets(st.integers(1, 1000), min_size=1), st.integers(1, 1100))
def test_never_outside_the_measured_range(counts: set[int], num_tokens: int) -> None:
    table = MeasurementTable(_at(*((count, float(count)) for count in counts)))
    found = table.lookup(request(), SM90, PAIR, num_tokens)
    assert (found is not None) is (min(counts) <= num_tokens <= max(counts))
    if num_tokens in counts:
        assert found == (num_tokens, f"measured {float(num_tokens):g} us (exact; bench)")


@pytest.mark.parametrize(
    "change",
    [{"arch": "sm100"}, {"shape": shape_key(request(top_k=4))}, {"candidate": "other"}],
    ids=["device", "shape", "candidate"],
)
def test_only_what_is_comparable_counts(change: dict[str, Any]) -> None:
    table = MeasurementTable([attrs.evolve(ROW, **change)])
    assert table.lookup(request(), SM90, PAIR, 64) is None


def test_a_device_without_generations_is_named_by_its_type() -> None:
    table = MeasurementTable([attrs.evolve(ROW, arch="cpu")])
    assert table.lookup(request(), CPU, PAIR, 64) is not None


def test_a_table_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps([attrs.asdict(ROW)]))
    assert MeasurementTable.load(path).rows == (ROW,)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[", "table.json: cannot be read"),
        ("{}", "table.json: expected a JSON list of rows, got dict"),
        ('[{"candidate": "x"}]', "table.json, row 0: .*missing"),
        ("[3]", "table.json, row 0: .*"),
        (json.dumps([attrs.asdict(ROW) | {"microseconds": -1}]), "row 0: .*field 'microseconds': expected a finite"),
        (json.dumps([attrs.asdict(ROW) | {"num_tokens": 0}]), "row 0: .*field 'num_tokens'"),
        (json.dumps([attrs.asdict(ROW) | {"tokens": 0}]), "row 0: .*unexpected"),
    ],
)
def test_a_wrong_table_names_the_row(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=match):
        MeasurementTable.load(path)


@pytest.mark.error_path
def test_a_missing_table(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none.json: cannot be read"):
        MeasurementTable.load(tmp_path / "none.json")
