"""What a call takes: by replays of a device graph, or by a clock around calls that ran to their end.

Callers hand in several calls whose data differ: repeated on the same data, a call would find its weights in a cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from moe_core.errors import MoeCoreError, is_interrupt
from moe_core.vocabulary import require_word

Call: TypeAlias = Callable[[], Any]

#: Clocks in seconds. `cpu` counts the time of this process on all its threads: for one thread on a shared machine.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
#: How a time can be taken, beside the clocks: by replays of a captured graph.
GRAPH = "graph"
#: Calls that run before a capture or a first sample: kernels are compiled there.
_WARM_UP = 2
#: Calls that a device's queue has places for, at a few tens of launches each.
_QUEUED = 50
#: Fewest samples that a limit on the time leaves: extremes of two equal things that are apart come in 1 % of such, and
#: in 10 % of three.
FEWEST_SAMPLES = 5
#: Standard errors from a median to where it surely is.
_STANDARD_ERRORS = 2.58


class CaptureError(MoeCoreError, RuntimeError):
    """Calls cannot be captured into a device graph; most often they wait for the host."""


@attrs.frozen
class Timing:
    """The samples of one measurement.

    Attributes:
        samples: Microseconds per call, one number for each repeat.
        method: `graph`, or the clock (`wall`, `cpu`).
    """

    samples: tuple[float, ...]
    method: str

    @property
    def microseconds(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def smallest(self) -> float:
        """The smallest sample."""
        return min(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Microseconds that a quarter of the samples is below, and a quarter above; one sample is both."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        lower, _, upper = statistics.quantiles(self.samples, n=4, method="inclusive")
        return lower, upper

    @property
    def bounds(self) -> tuple[float, float]:
        """Microseconds between which the median would lie if samples were taken for ever, with 99 % (of five 94 %).

        Two samples whose ranks bound a median whatever the distribution: those of the binomial, by its normal
        approximation (Hahn and Meeker, Statistical Intervals, 5.2). Of fewer than twelve the smallest and the largest.
        """
        ordered, count = sorted(self.samples), len(self.samples)
        rank = max(math.floor((count + 1) / 2 - _STANDARD_ERRORS / 2 * math.sqrt(count)), 1)
        return ordered[rank - 1], ordered[-rank]

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median; 0 for one sample."""
        lower, upper = self.quartiles
        return (upper - lower) / self.microseconds


def fastest_of(timings: Mapping[str, Timing]) -> tuple[str, ...]:
    """The name with the smallest median, then of those that samples do not tell apart from it; of several timings.

    These are the ones whose bounds overlap with its own, in the order of their medians; none of none.
    """
    order = sorted(timings, key=lambda name: timings[name].microseconds)
    return tuple(name for name in order if timings[name].bounds[0] <= timings[order[0]].bounds[1])


@attrs.frozen(eq=False)
class Prepared:
    """Calls that were warmed up, and captured if that was asked for.

    Attributes:
        sample: Runs all calls once and gives microseconds per call.
        method: As in `Timing`.
        outputs: What the captured calls return: memory that each replay fills again; empty without a graph.
    """

    sample: Callable[[], float]
    method: str
    outputs: tuple[Any, ...] = ()


def prepare(
    calls: Sequence[Call],
    device: str,
    *,
    capture: bool = True,
    clock: str = "wall",
    told: Callable[[float], None] | None = None,
) -> Prepared:
    """Make calls ready to be timed.

    Args:
        calls: What is timed, one after the other.
        device: Type of the device that they run on.
        capture: Whether to capture them into one graph where the device has graphs (`cuda`).
        clock: One of `CLOCKS`, for what is not captured.
        told: Called before each call that warms up, with 0, and without a graph then with about how many seconds a
            sample will take; what it raises ends the work.

    Raises:
        CaptureError: They cannot be captured.
        SpecError: No such clock.
    """
    require_word(clock, CLOCKS, "clock")
    told = told or nobody
    if device == "cuda" and capture:
        return _captured(calls, told)
    took = 0.0
    for call in calls[:_WARM_UP]:
        told(0.0)
        start = CLOCKS["wall"]()
        call()
        synchronize(device)
        took = CLOCKS["wall"]() - start
    told(took * len(calls))
    now = CLOCKS[clock]

    def sample() -> float:
        synchronize(device)
        start = now()
        for call in calls:
            call()
        synchronize(device)
        return (now() - start) * 1e6 / len(calls)

    return Prepared(sample, clock)


def nobody(*_: object) -> None:
    """Takes what is told where nobody asked to be told."""


def _captured(calls: Sequence[Call], told: Callable[[float], None]) -> Prepared:
    outer = torch.cuda.current_stream()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        for call in calls[:_WARM_UP]:
            told(0.0)
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            outputs = tuple(call() for call in calls)
    except RuntimeError as error:
        # What fails in between leaves the stream of the capture as the current one.
        torch.cuda.set_stream(outer)
        raise CaptureError(f"not captured: {str(error).splitlines()[0]}") from error
    # The first replay uploads the graph.
    graph.replay()

    def sample() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / len(calls)

    return Prepared(sample, GRAPH, outputs)


def take_turns(
    prepared: Mapping[str, Prepared],
    repeats: int = 15,
    seconds: float | None = None,
    failed: Callable[[str, BaseException], None] | None = None,
    so_far: Callable[[dict[str, Timing]], None] | None = None,
) -> dict[str, Timing]:
    """Samples of several, in turns: a change of the machine's load meets all of them.

    Args:
        prepared: Name -> what is timed.
        repeats: Samples of each.
        seconds: Take no further samples after this time, but at least `FEWEST_SAMPLES` of each.
        failed: Told of the name and of anything but the user's interrupt that a sample raises: that one has no timing,
            the others go on. None ends with the error.
        so_far: Told of the samples that there are after each round.
    """
    samples: dict[str, list[float]] = {name: [] for name in prepared}
    start = time.perf_counter()

    def timings() -> dict[str, Timing]:
        return {name: Timing(tuple(taken), prepared[name].method) for name, taken in samples.items()}

    for done in range(repeats):
        if seconds is not None and done >= FEWEST_SAMPLES and time.perf_counter() - start > seconds:
            break
        for name in [*samples]:
            try:
                samples[name].append(prepared[name].sample())
            except BaseException as error:
                if failed is None or is_interrupt(error):
                    raise
                del samples[name]
                failed(name, error)
        if so_far is not None:
            so_far(timings())
    return timings()


def measure(
    calls: Sequence[Call],
    device: str,
    *,
    repeats: int = 15,
    seconds: float | None = None,
    capture: bool = True,
    clock: str = "wall",
) -> Timing:
    """`prepare` and `take_turns` for one alone; arguments and errors as there."""
    ready = prepare(calls, device, capture=capture, clock=clock)
    return take_turns({"": ready}, repeats, seconds)[""]


def issue_microseconds(call: Call, device: str, calls: int = 1000) -> float:
    """Time of the host per call, of calls that nothing waits for: what a caller pays who captures no graph."""
    call()
    passed = 0.0
    for first in range(0, calls, _QUEUED):
        # Outside the clock: a host that is far ahead of its device has to wait for a place in the queue.
        synchronize(device)
        start = time.perf_counter()
        for _ in range(min(_QUEUED, calls - first)):
            call()
        passed += time.perf_counter() - start
    synchronize(device)
    return passed * 1e6 / calls


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given; nothing on a CPU."""
    if device != "cpu":
        torch.accelerator.synchronize()
