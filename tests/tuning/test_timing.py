"""Times by a clock that the test moves; graphs where a GPU is."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from moe_core.errors import SpecError
from moe_core.tuning import timing
from moe_core.tuning.timing import CaptureError, Timing, issue_microseconds, measure, prepare, take_turns

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Clock:
    """Seconds that pass only where a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float):
        def call() -> None:
            self.now += seconds

        return call


@pytest.fixture
def clock(monkeypatch):
    moved = Clock()
    monkeypatch.setitem(timing.CLOCKS, "wall", moved)
    return moved


def test_time_per_call_is_the_mean_over_the_calls_of_a_sample(clock):
    timed = measure([clock.takes(1e-3), clock.takes(3e-3)], "cpu", repeats=4)
    assert timed.samples == pytest.approx([2000.0] * 4)
    assert timed.method == "wall"


def test_warm_up_is_not_in_the_samples(clock):
    slow_at_first = iter([5.0, *[1e-6] * 10])

    def call():
        clock.now += next(slow_at_first)

    assert measure([call], "cpu", repeats=3).samples == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(("count", "bounds"), [(1, (1, 1)), (2, (1, 2)), (11, (1, 11)), (12, (2, 11)), (15, (3, 13))])
def test_bounds_of_a_median_are_samples_by_their_rank(count, bounds):
    samples = tuple(random.Random(count).sample(range(1, count + 1), count))
    assert Timing(samples, "wall").bounds == bounds


def test_bounds_hold_the_median_of_what_is_sampled():
    drawn = random.Random(1)
    found = [Timing(tuple(drawn.lognormvariate(0, 0.5) for _ in range(15)), "wall").bounds for _ in range(2000)]
    # Fewer than 3 of 15 lie on one side of it in 2 * 121 of 2**15 cases.
    assert sum(low <= 1 <= high for low, high in found) / 2000 > 0.98


def test_median_and_spread_of_samples():
    timed = Timing((10.0, 11.0, 12.0, 13.0, 500.0), "wall")
    assert (timed.microseconds, timed.smallest) == (12.0, 10.0)
    assert timed.quartiles == pytest.approx((11, 13))
    assert timed.spread == pytest.approx(2 / 12)
    assert (Timing((7.0,), "wall").quartiles, Timing((7.0,), "wall").spread) == ((7.0, 7.0), 0.0)


def test_turns_alternate_between_those_that_are_timed(clock):
    order = []
    ready = {name: prepare([lambda name=name: order.append(name)], "cpu") for name in "ab"}
    order.clear()
    timings = take_turns(ready, repeats=2)
    assert order == ["a", "b", "a", "b"]
    assert {name: len(timed.samples) for name, timed in timings.items()} == {"a": 2, "b": 2}


def test_what_fails_in_a_turn_has_no_timing_and_an_interrupt_ends(clock):
    def failing(error):
        calls = itertools.count()
        return prepare([lambda: next(calls) < 3 or (_ for _ in ()).throw(error)], "cpu")

    told = []
    ready = {"a": prepare([int], "cpu"), "b": failing(SystemExit(1)), "c": prepare([int], "cpu")}
    timings = take_turns(ready, repeats=4, failed=lambda *of_it: told.append(of_it))
    assert {name: len(timed.samples) for name, timed in timings.items()} == {"a": 4, "c": 4}
    assert [(name, type(error)) for name, error in told] == [("b", SystemExit)]
    with pytest.raises(KeyboardInterrupt):
        take_turns({"b": failing(KeyboardInterrupt())}, repeats=4, failed=lambda *of_it: None)
    with pytest.raises(ValueError, match="no tile"):
        take_turns({"b": failing(ValueError("no tile"))}, repeats=4)


def test_a_time_limit_leaves_as_many_samples_as_tell_two_apart():
    assert len(measure([lambda: None], "cpu", repeats=50, seconds=0.0).samples) == 5


def test_issue_time_is_per_call_and_without_the_waiting_between_blocks(monkeypatch, clock):
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    monkeypatch.setattr(timing, "synchronize", lambda device: clock.takes(1.0)())
    assert issue_microseconds(clock.takes(2e-6), "cuda", calls=120) == pytest.approx(2.0)


@pytest.mark.error_path
def test_an_unknown_clock_is_refused():
    with pytest.raises(SpecError, match="clock"):
        measure([lambda: None], "cpu", clock="sundial")


@needs_gpu
def test_calls_are_captured_and_give_what_they_give_outside():
    rows = torch.randn(3, 64, device="cuda")
    ready = prepare([lambda i=i: rows[i] * 2 for i in range(3)], "cuda")
    assert ready.method == "graph"
    assert ready.sample() > 0
    assert all(torch.equal(output, rows[i] * 2) for i, output in enumerate(ready.outputs))
    rows.add_(1)
    ready.sample()
    assert torch.equal(ready.outputs[2], rows[2] * 2)


@needs_gpu
@pytest.mark.error_path
def test_calls_that_wait_for_the_host_are_not_captured_and_leave_the_stream_as_it_was():
    rows, before = torch.randn(8, device="cuda"), torch.cuda.current_stream()
    with pytest.raises(CaptureError, match="not captured"):
        prepare([lambda: rows.sum().item()], "cuda")
    assert torch.cuda.current_stream() == before
    assert measure([lambda: rows.sum().item()], "cuda", capture=False, repeats=3).method == "wall"
    assert measure([lambda: rows * 2], "cuda", repeats=3).method == "graph"
