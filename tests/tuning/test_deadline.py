"""A limit on the time, by a clock that the test moves."""

from __future__ import annotations

import math

import pytest

from moe_core.tuning.deadline import Deadline, TimeUpError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_fits_begins_and_what_does_not_is_named() -> None:
    clock = Clock()
    end = Deadline(110.0, clock)
    end.require("T=1")
    end.require("T=1", 10.0)
    with pytest.raises(TimeUpError, match=r"^T=2 would take about 11 s more, 10 s are left$"):
        end.require("T=2", 11.0)
    clock.now = 111.0
    assert end.left == 0
    with pytest.raises(TimeUpError, match=r"^time is up before T=2$"):
        end.require("T=2")


def test_never_is_never() -> None:
    Deadline().require("anything", 1e300)
    assert Deadline().left == Deadline.after(math.inf).left == math.inf
    assert Deadline.after(0.0).left == 0


def test_what_would_not_be_done_in_time_ends_as_soon_as_its_pace_is_known() -> None:
    clock = Clock()
    tell = Deadline(120.0, clock).watched("the draw")
    # What comes before the first call comes once.
    clock.now = 108.0
    tell(1, 21)
    clock.now = 108.9
    tell(2, 21)
    clock.now = 109.1
    tell(3, 21)
    clock.now = 109.6
    with pytest.raises(TimeUpError, match="the draw would take about 14 s more, 10 s are left"):
        tell(3, 21)


def test_without_a_pace_only_the_end_counts() -> None:
    clock = Clock()
    tell = Deadline(110.0, clock).watched("the draw")
    tell(1, 100)
    clock.now = 109.0
    tell(1, 100)
    clock.now = 110.0
    with pytest.raises(TimeUpError, match="time is up before the draw"):
        tell(99, 100)
