"""Long steps say what they do and how far they are where no bar can, and not too often."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

from moe_core.cli import progress
from moe_core.cli.progress import doing, duration, progress_bar, stage


@pytest.fixture
def clock(monkeypatch):
    """The time that the lines are paced by, set by the test."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_at_the_beginning_some_on_the_way_and_one_at_the_end(clock, capsys):
    with progress_bar("calibrating", "windows") as tell:
        for done in range(1, 31):
            clock[0] += 4.0
            tell(done, 30)
    first, *middle, last = capsys.readouterr().err.splitlines()
    assert first == "calibrating ..."
    assert middle[0] == "calibrating: 3 of 30 windows, about 108 s left"
    assert last.startswith("calibrating: ")
    assert last.endswith(" s")
    # 12 s, 24 s, ...: of 120 s nothing is said of the end, where the step is done.
    assert len(middle) == 9


def test_hours_are_no_hundreds_of_lines(clock, capsys):
    with progress_bar("calibrating", "windows") as tell:
        for done in range(1, 10_001):
            clock[0] += 2.0
            tell(done, 10_000)
    assert 20 < len(capsys.readouterr().err.splitlines()) < 100


def test_bytes_have_units(clock, capsys):
    with progress_bar("loading") as tell:
        tell(0, 16_060_000_000)
        clock[0] += 60.0
        tell(1_000_000_000, 16_060_000_000)
    assert "loading: 1.0 GB of 16.1 GB, about 15 minutes left" in capsys.readouterr().err


def test_what_passed_before_the_first_unit_is_not_taken_for_its_pace(clock, capsys):
    with progress_bar("checking", "checks") as tell:
        # Processes start, and then a batch comes at once.
        clock[0] += 12.0
        for done in range(1, 33):
            tell(done, 1032)
        for done in range(33, 1032):
            clock[0] += 0.1
            tell(done, 1032)
    _, first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "checking: 1 of 1032 checks"
    left = int(second.partition("about ")[2].partition(" s")[0])
    assert 60 < left < 100


def test_a_pace_that_has_become_slower_counts(clock, capsys):
    with progress_bar("checking", "checks") as tell:
        for done in range(1, 201):
            clock[0] += 0.1 if done <= 100 else 1.0
            tell(done, 201)
    told = [line.partition("about ")[2] for line in capsys.readouterr().err.splitlines()[1:-1]]
    # 1 s each by then, of which the pace of all would not know.
    assert told[1:4] == ["90 s left", "80 s left", "70 s left"]


def test_what_is_quick_says_only_that_it_begins_and_ends(capsys):
    with progress_bar("loading") as tell:
        tell(1, 2)
        tell(2, 2)
    with stage("warm-up"):
        pass
    begin, end, *others = capsys.readouterr().err.splitlines()
    assert begin == "loading ..."
    assert end.startswith("loading: ")
    assert [line.partition(" ")[0] for line in others] == ["warm-up", "warm-up:"]


def test_a_terminal_gets_a_bar_and_no_lines(clock, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    with progress_bar("loading", "windows") as tell:
        clock[0] += 60.0
        tell(1, 2)
    assert "left" not in capsys.readouterr().err


def test_durations_are_seconds_and_then_minutes():
    assert [duration(seconds) for seconds in (0.4, 119, 600)] == ["0 s", "119 s", "10 minutes"]


def test_what_is_done_is_said_seldom_enough_for_a_log(clock, capsys):
    with doing() as steps:
        for step in range(1, 1001):
            clock[0] += 1.0
            steps.begin(f"step {step}")
    first, second, *_, last = lines = capsys.readouterr().err.splitlines()
    assert (first, second) == ("  step 10 ...", "  step 20 ...")
    assert last.startswith("  step ")
    assert 20 < len(lines) < 60


def test_a_line_that_stays_is_not_written_into_a_spinners(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with doing() as steps:
        steps.begin("sampling")
        # As where what others print is kept apart.
        with redirect_stderr(io.StringIO()):
            steps.keep("1/2 done")
    before, line, after = capsys.readouterr().err.partition("1/2 done")
    assert line
    assert "sampling" not in before.rpartition("\x1b[2K")[2]
    assert "sampling" in after
