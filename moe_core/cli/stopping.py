"""How a command ends that nobody waits for: by a signal, or because the reader of its output has gone."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from moe_core.errors import is_interrupt

#: What a shell reports for a program that an interrupt has ended.
INTERRUPTED = 130
_NAMES = ("SIGTERM", "SIGHUP")


class SignalExit(SystemExit):
    """A signal came.

    Attributes:
        number: Which.
        name: Its name: `SIGTERM`.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number, self.name = number, signal.Signals(number).name


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, and then become `SignalExit` with the exit code of shells.

    Ctrl-C among several exceptions ends it as Ctrl-C alone. A signal that is ignored stays so, and one that has a
    handler keeps it. For the main thread.
    """
    # Not every system has both.
    known = (getattr(signal, name, None) for name in _NAMES)
    ours = [number for number in known if number is not None and signal.getsignal(number) is signal.SIG_DFL]
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # A second one would end the cleaning up.
        for other in ours:
            signal.signal(other, signal.SIG_IGN)
        came.append(number)
        # What lets the user's Ctrl-C pass lets this pass, where an exit would be a plugin's failure.
        raise KeyboardInterrupt

    try:
        for number in ours:
            signal.signal(number, stop)
        yield
    except BaseException as error:
        if not is_interrupt(error):
            raise
        raise SignalExit(came[0]) if came else KeyboardInterrupt from None
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def telling_when_stopped(tell: Callable[[str], None]) -> Iterator[None]:
    """`exit_on_signals` for what keeps something, which is said before the exit.

    Args:
        tell: Called with what ended the block: `interrupted`, `ended by SIGTERM`.

    Raises:
        SystemExit: With the exit code of shells.
    """
    try:
        with exit_on_signals():
            yield
    except KeyboardInterrupt:
        what, code = "interrupted", INTERRUPTED
    except SignalExit as stop:
        what, code = f"ended by {stop.name}", 128 + stop.number
    else:
        return
    # After SIGHUP there may be no terminal any more.
    with contextlib.suppress(OSError):
        tell(what)
    raise SystemExit(code)


@contextlib.contextmanager
def exit_with_reader() -> Iterator[None]:
    """Where the output cannot be written, end without a traceback.

    Whose reader closes it (`| head`) ends quietly, with the exit code that shells give to SIGPIPE; a full disk is told.
    The signal itself stays ignored, as Python does: it would also end the program where a plugin's connection breaks.
    """
    try:
        try:
            yield
        finally:
            # A program that is started without an output has none.
            if sys.stdout is not None:
                sys.stdout.flush()
    except (OSError, SystemExit) as error:
        # Libraries that print turn it into an exit of their own, of which it is the context.
        cause = error if isinstance(error, OSError) else error.__context__
        is_closed = isinstance(cause, BrokenPipeError)
        # Errors of other files know their names.
        is_full = isinstance(cause, OSError) and cause.errno == errno.ENOSPC and cause.filename is None
        if not is_closed and not is_full:
            raise
        # The interpreter writes what is left when it ends.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        if is_closed:
            raise SystemExit(128 + signal.SIGPIPE) from None
        sys.stderr.write("error: the output cannot be written: no space is left on its device\n")
        raise SystemExit(1) from None
