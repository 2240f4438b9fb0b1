"""Signals that end a program as exceptions, so that what it was doing is cleaned up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_NAMES = ("SIGTERM", "SIGHUP")


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Until the block ends, SIGTERM and SIGHUP raise `SystemExit`, with the exit code that shells give to them.

    A signal that is ignored stays so, and one that has a handler keeps it. For the main thread.
    """
    # Not every system has both.
    known = (getattr(signal, name, None) for name in _NAMES)
    ours = [number for number in known if number is not None and signal.getsignal(number) is signal.SIG_DFL]

    def stop(number: int, frame: FrameType | None) -> None:
        # A second one would end the cleaning up.
        for other in ours:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    try:
        for number in ours:
            signal.signal(number, stop)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
