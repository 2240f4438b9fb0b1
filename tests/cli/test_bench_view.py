"""What the tables of `moe-core bench` say below their figures."""

from __future__ import annotations

import io
import re

import attrs
import pytest
from rich.console import Console

from moe_core.bench import report
from moe_core.bench.report import Machine, Report, Row
from moe_core.cli.bench_view import report_view
from moe_core.tuning.ceilings import Ceilings
from moe_core.tuning.timing import Timing, fastest_of

MACHINE = Machine(
    device="card",
    arch="sm90",
    threads=1,
    clock="wall",
    versions={},
    ceilings=Ceilings(bytes_per_us=1e6, flops_per_us={"bf16": 1e8}),
    date="2026-11-28",
)


def _row(num_tokens, runs, implementation="moe-core"):
    return Row(
        layer="layer",
        scheme="bf16",
        num_tokens=num_tokens,
        implementation=implementation,
        runs=runs,
        floor=10.0,
        timing=Timing((434.4,), "wall") if runs else None,
        error=1e-3,
    )


def _printed(*rows, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(report_view(Report(MACHINE, rows)))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ({1: "a", 64: "a"}, "moe-core: a"),
        ({8: "a"}, "moe-core: a"),
        ({1: "a", 2048: "a", 8192: "b"}, "moe-core: T <= 2048: a; T = 8192: b"),
        ({1: "a", 2: "b", 4: "b", 8: "a"}, "moe-core: T = 1: a; T = 2 to 4: b; T = 8: a"),
        ({1: "a", 2: "", 4: "a"}, "moe-core: a"),
        ({1: "", 2: "a", 4: "b"}, "moe-core: T = 2: a; T = 4: b"),
    ],
)
def test_what_ran_is_said_of_the_numbers_of_tokens_with_which_it_did(runs, said):
    others = [_row(count, "torch 2", "torch grouped_mm") for count in runs]
    rows = [row for count, name in runs.items() for row in (_row(count, name), others.pop(0))]
    lines = [line.strip() for line in _printed(*rows).splitlines()]
    place = next(index for index, line in enumerate(lines) if line.startswith("ran "))
    assert lines[place].split(maxsplit=1) == ["ran", said]
    assert lines[place + 1] == "torch grouped_mm: torch 2"


def test_notes_stand_in_the_order_of_the_table():
    ours, first, second = (_row(1, "a", name) for name in ("moe-core", "first", "second"))
    few = [ours, attrs.evolve(first, note="of one count"), attrs.evolve(second, note="of both")]
    many = [attrs.evolve(ours, note="found last"), first, attrs.evolve(second, note="of both")]
    text = _printed(*few, *(attrs.evolve(row, num_tokens=8) for row in many))
    places = [text.index(f": {note}") for note in ("found last", "of one count", "of both")]
    assert places == sorted(places)


def test_what_went_wrong_stands_in_the_table_too():
    names = ("moe-core", "wrong", "broken", "untried", "untried with many", "known")
    problems = ("", "wrong result: it is NaN or infinite", "no such tile", "not run: no memory")
    few = [_row(1, "a", name) for name in names]
    few[1:4] = [attrs.evolve(row, timing=None, problem=text) for row, text in zip(few[1:4], problems[1:], strict=True)]
    few[5] = attrs.evolve(few[5], timing=None, note="the same as moe-core, not timed again")
    many = [attrs.evolve(row, num_tokens=8) for row in few]
    many[4] = attrs.evolve(many[4], timing=None, problem=problems[3])
    text = _printed(*few, *many)
    rows = [" ".join(line.split()) for line in text[: text.index("\nran ")].splitlines()[3:]]
    figures = "434 0% maybe 43.44 1.00 1e-03 wall"
    ours = f"moe-core {figures.replace('maybe', 'yes')}"
    assert rows[1:5] == [ours, "wrong wrong", "broken failed", f"untried with many {figures}"]
    assert rows[6:] == [ours, "wrong wrong", "broken failed", "untried with many not run"]
    assert "broken: no such tile" in text


def _sampled(implementation, *samples, num_tokens=1):
    row = _row(num_tokens, "a", implementation)
    return attrs.evolve(row, timing=Timing(samples, "wall") if samples else None)


#: The bounds of few samples are the smallest and the largest.
SAMPLED = (
    _sampled("moe-core", 11, 12, 13, 14, 15),
    _sampled("as fast", 14, 15, 16, 17, 18),
    _sampled("slower", 15.5, 16, 17, 18, 19),
    _sampled("fastest by its median", 1, 2, 10, 20, 21),
    _sampled("not timed"),
    _sampled("moe-core", 30, 31, 32, num_tokens=8),
    _sampled("as fast", 20, 21, 22, num_tokens=8),
)


def test_what_samples_do_not_tell_from_the_fastest_is_told():
    text = _printed(*SAMPLED)
    told = [line.rsplit("%", 1)[1].split()[0] for line in text[: text.index("\nran ")].splitlines() if "%" in line]
    # Of one that is far from it, only figures follow.
    assert told == ["maybe", "maybe", "maybe", "yes", "3.10", "yes"]
    parts = Report(MACHINE, SAMPLED[:3]).to_json()["rows"]
    assert [(row["bounds"], row["fastest"]) for row in parts] == [
        ([11, 15], True),
        ([14, 18], True),
        ([15.5, 19], False),
    ]
    told = [row["fastest"] for row in Report(MACHINE, SAMPLED).to_json()["rows"]]
    assert told == [True, True, True, True, False, False, True]


def _legend(printed):
    return printed[printed.index("measured on") :]


def test_every_column_is_explained():
    rows = [
        attrs.evolve(_row(1, "a"), issue_microseconds=2.0, held_bytes=10**6, activation_bytes=10**6),
        _row(1, "torch 2", "torch grouped_mm"),
    ]
    text = _printed(*rows)
    for header in ("T", "SPREAD", "FASTEST", "/FLOOR", "/OURS", "ERROR", "BY", "HOST us", "HELD MB", "/ROWS"):
        assert header in text.splitlines()[2], header
        assert re.search(rf"^{header}  +\w", _legend(text), flags=re.MULTILINE), header


def test_columns_that_are_not_there_are_not_explained():
    text = _printed(_row(1, "a"))
    assert not {"HOST", "HELD", "ROWS"} & set(text.split())


@pytest.mark.parametrize("width", range(50, 120, 9))
def test_names_and_numbers_stay_whole_however_narrow_the_terminal_is(width):
    name = "moe-core torch:none.contiguous + vendor:kernels.fp8_contiguous_unverified"
    row = attrs.evolve(_row(8192, "a", name), issue_microseconds=434.4, held_bytes=10**9, activation_bytes=10**6)
    text = _printed(attrs.evolve(row, implementation="moe-core"), row, width=width)
    words = text.split()
    assert max(map(len, text.splitlines())) <= width
    assert {*name.split(), "8192", "434", "434.4", "43.44", "1000.00"} <= set(words)


def test_each_number_of_tokens_is_looked_at_once_for_the_fastest(monkeypatch):
    rows = [attrs.evolve(row, num_tokens=count) for count in range(1, 5) for row in SAMPLED[:5]]
    looked: list[int] = []
    monkeypatch.setattr(report, "fastest_of", lambda timings: looked.append(len(timings)) or fastest_of(timings))
    told = [row["fastest"] for row in Report(MACHINE, rows).to_json()["rows"]]
    assert told == [True, True, True, True, False] * 4
    report_view(Report(MACHINE, rows))
    # Of five rows one has no time; once for JSON and once for the table.
    assert looked == [4] * 4 * 2
