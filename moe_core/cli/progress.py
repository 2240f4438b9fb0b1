"""How far long steps are, on stderr: a bar on a terminal, plain lines elsewhere, and in the end how long each took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe_core.cli.output import stderr

#: Seconds between two lines where there is no bar: at least so many, and a share of those that have passed.
_PACE, _PACE_SHARE = 10.0, 0.1
#: How often a second a spinner is drawn beside work that is timed.
_REFRESH = 2
#: Least seconds from which the time that is left is reckoned: what comes in batches has none of its own.
_TELLING = 1.0


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Say that a step begins (on a terminal with a spinner), and then how long it took."""
    console, start = stderr(), time.perf_counter()
    _begin(console, title)
    with console.status(f"{title} ..."):
        yield
    _end(console, title, start)


@contextmanager
def progress_bar(title: str, unit: str = "bytes") -> Iterator[Callable[[int, int], None]]:
    """Say that a step begins, how far it is and, as of `stage`, how long it took.

    Args:
        title: What is being done.
        unit: What the step counts: `bytes`, or something that is shown as it is (`windows`).

    Yields:
        What the step calls with (units done, units in all).
    """
    console, start = stderr(), time.perf_counter()
    _begin(console, title)
    if console.is_terminal:
        amount = (DownloadColumn(),) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
        columns = (TextColumn(title), BarColumn(), *amount, TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield Lines(console, title, unit).tell
    _end(console, title, start)


@contextmanager
def doing() -> Iterator[Steps]:
    """Say what is being done, of work in many steps: on a terminal beside a spinner, elsewhere in lines."""
    console = stderr()
    if console.is_terminal:
        with console.status("", refresh_per_second=_REFRESH) as status:
            yield Steps(console, lambda what: status.update(f"{what} ..."))
    else:
        yield Steps(console, Lines(console).say)


class Steps:
    """What work in many steps says.

    Attributes:
        begin: Called with each step, in words, before it.
    """

    def __init__(self, console: Console, begin: Callable[[str], None]) -> None:
        self._console, self.begin = console, begin

    def keep(self, line: str) -> None:
        """Say what is done, in a line that stays; another console would write it into the spinner's."""
        self._console.print(line, style="dim", soft_wrap=True)


def duration(seconds: float) -> str:
    """`90 s`, `12 minutes`."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


class Lines:
    """Prints how far a step is, seldom enough for a log."""

    def __init__(self, console: Console, title: str = "", unit: str = "") -> None:
        """Begin; `title` and `unit` as of `progress_bar`, for what tells of units."""
        self._console, self._title, self._unit = console, title, unit
        self._start = time.monotonic()
        self._next = self._start + _PACE
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def tell(self, done: int, total: int) -> None:
        """Print a line if it is time for one: `done` of `total` units are done.

        The time that is left follows from the pace since the first call: what came before it, such as an import or the
        start of processes, comes once. Where it has become slower since the last line, it follows from that: what is
        small is often done first.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        if not 0 < done < total or not self._is_time(now):
            return
        amount = f"{decimal(done)} of {decimal(total)}" if self._unit == "bytes" else f"{done} of {total} {self._unit}"
        left = max(_left(mark, now, done, total) for mark in (self._first, self._last or self._first))
        self._last = now, done
        rest = f", about {duration(left)} left" if left else ""
        self._console.print(f"{self._title}: {amount}{rest}", style="dim", soft_wrap=True)

    def say(self, what: str) -> None:
        """Print what is done next, if it is time for a line."""
        if self._is_time(time.monotonic()):
            self._console.print(f"  {what} ...", style="dim", soft_wrap=True)

    def _is_time(self, now: float) -> bool:
        """Whether a line is due, after which the next one comes later."""
        if now < self._next:
            return False
        self._next = now + max(_PACE, _PACE_SHARE * (now - self._start))
        return True


def _left(since: tuple[float, int], now: float, done: int, total: int) -> float:
    """Seconds that are left at the pace since then, 0 where that is too short to tell."""
    start, before = since
    if now - start < _TELLING or done <= before:
        return 0.0
    return (now - start) * (total - done) / (done - before)


def _begin(console: Console, title: str) -> None:
    if not console.is_terminal:
        console.print(f"{title} ...", style="dim", soft_wrap=True)


def _end(console: Console, title: str, start: float) -> None:
    console.print(f"{title}: {time.perf_counter() - start:.1f} s", style="dim", soft_wrap=True)
