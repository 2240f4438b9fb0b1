"""When measuring ends, its set-up included: what would pass the end is not begun, and what has begun is ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import attrs

from moe_core.errors import MoeCoreError

#: Least seconds after which a pace tells how long the rest takes.
_TELLING = 1.0


class TimeUpError(MoeCoreError):
    """What comes next does not fit into the time that is left; the message names it."""


@attrs.frozen
class Deadline:
    """An end that whoever works asks about between two steps.

    Attributes:
        at: When, in seconds of the clock; infinity for never.
        clock: Counts seconds.
    """

    at: float = math.inf
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """In so many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until then, 0 once it has passed, infinity for never."""
        return max(self.at - self.clock(), 0.0)

    def require(self, what: str, seconds: float = 0.0) -> None:
        """Say that something begins.

        Args:
            what: What, for the message.
            seconds: About how long it takes, as far as that is known.

        Raises:
            TimeUpError: It would not end in time.
        """
        left = self.left
        if left <= 0:
            raise TimeUpError(f"time is up before {what}")
        if seconds > left:
            raise TimeUpError(f"{what} would take about {seconds:.0f} s more, {left:.0f} s are left")

    def watched(self, what: str) -> Callable[[int, int], None]:
        """What a step of many equal parts calls with (parts done, parts in all); raises as `require`.

        How long the rest takes follows from the pace since the first call: what came before it comes once.
        """
        first: list[tuple[float, int]] = []

        def tell(done: int, total: int) -> None:
            now = self.clock()
            if not first:
                first.append((now, done))
            passed, parts = now - first[0][0], done - first[0][1]
            self.require(what, passed * (total - done) / parts if passed > _TELLING and parts > 0 else 0.0)

        return tell
