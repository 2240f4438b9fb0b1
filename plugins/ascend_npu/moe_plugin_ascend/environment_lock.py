"""Environment variables that Ascend's DeepEP reads while it is called, set for the length of a call.

Some of what a call does can be told to the library only through the process's environment. A layer sets what its own
call needs and restores what was there, so that no layer sees the value of another: calls that need the same value may
overlap, a call that needs another one waits until they are over.

Warning:
    A thread that waits here keeps other ranks waiting inside their collective. Let layers that need different values
    communicate in the same order on all ranks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs


@attrs.define
class _Holding:
    """One variable while calls need it: the value they need, how many they are, and what to restore."""

    value: str
    before: str | None
    calls: int = 0


class EnvironmentLock:
    """Who needs which value of which variable at the moment."""

    def __init__(self) -> None:
        """Nobody needs anything yet."""
        self._changed = threading.Condition()
        self._holdings: dict[str, _Holding] = {}

    @contextmanager
    def holding(self, name: str, value: str) -> Iterator[None]:
        """Run the body while variable `name` is `value`; waits for calls that need another value.

        The C library's environment is changed too, so that compiled code sees it.
        """
        with self._changed:
            self._changed.wait_for(lambda: name not in self._holdings or self._holdings[name].value == value)
            if name not in self._holdings:
                self._holdings[name] = _Holding(value, os.environ.get(name))
                os.environ[name] = value
            self._holdings[name].calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._release(name)

    def _release(self, name: str) -> None:
        holding = self._holdings[name]
        holding.calls -= 1
        if holding.calls:
            return
        del self._holdings[name]
        if holding.before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = holding.before
        self._changed.notify_all()


#: The process has one environment.
ENVIRONMENT = EnvironmentLock()
