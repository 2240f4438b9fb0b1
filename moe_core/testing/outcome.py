"""What a check may say: it passed (returns), it failed, or it could not run here and why."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

import attrs

from moe_core.errors import MoeCoreError, in_words, is_interrupt

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


class ConformanceError(MoeCoreError):
    """A backend does something else than it declares; the text says what, and what it looks like."""


class NotRun(Exception):
    """A check could not run; the text says why. Never a pass."""


def require(condition: object, problem: str) -> None:
    """Raise `ConformanceError` with `problem` unless `condition` holds; stays under `python -O`."""
    if not condition:
        raise ConformanceError(problem)


@attrs.frozen(kw_only=True)
class Result:
    """What became of one case.

    Attributes:
        check: Name of the check.
        subject: What it was run on: a plugin, a pair or a cell.
        status: `passed`, `failed` or `not run`.
        text: The failure, or why it was not run.
        seconds: How long it took.
        traceback: Where a backend raised something of its own, "" otherwise.
    """

    check: str
    subject: str
    status: str
    text: str = ""
    seconds: float = 0.0
    traceback: str = ""


@attrs.frozen(kw_only=True)
class Case:
    """One check on one subject, not yet run.

    Attributes:
        check: Name of the check.
        subject: What it is run on.
        function: Returns, or raises `ConformanceError` or `NotRun`; anything else is a failure too.
    """

    check: str
    subject: str
    function: Callable[[], None]

    def run(self) -> Result:
        """Run it; whatever the backend raises (`sys.exit` included) becomes a result."""
        start = time.perf_counter()
        status, text, trace = PASSED, "", ""
        try:
            self.function()
        except NotRun as reason:
            status, text = NOT_RUN, str(reason)
        except ConformanceError as error:
            status, text = FAILED, str(error)
        except BaseException as error:
            # The next case runs whatever this one raised, unless it was the user.
            if is_interrupt(error):
                raise
            # Notes say which function it was.
            status, text = FAILED, "; ".join([f"it raised {in_words(error)}", *getattr(error, "__notes__", ())])
            trace = "".join(traceback.format_exception(error))
        seconds = time.perf_counter() - start
        return Result(
            check=self.check, subject=self.subject, status=status, text=text, seconds=seconds, traceback=trace
        )

    def __str__(self) -> str:
        """`check[subject]`: the name in reports, and what an expected failure is matched with."""
        return f"{self.check}[{self.subject}]"
