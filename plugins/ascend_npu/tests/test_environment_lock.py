"""A variable is what a call needs while the call lasts, and what it was afterwards, whoever else calls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from moe_plugin_ascend.environment_lock import EnvironmentLock

NAME = "MOE_PLUGIN_ASCEND_TEST"


@pytest.fixture(params=[None, "before"])
def before(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    monkeypatch.delenv(NAME, raising=False)
    if request.param is not None:
        monkeypatch.setenv(NAME, request.param)
    yield request.param
    assert os.environ.get(NAME) == request.param


def test_it_is_set_and_restored(before: str | None) -> None:
    lock = EnvironmentLock()
    for value in ("0", "1"):
        with lock.holding(NAME, value):
            assert os.environ[NAME] == value
        assert os.environ.get(NAME) == before


def test_a_call_that_fails_restores_it(before: str | None) -> None:
    lock = EnvironmentLock()
    with pytest.raises(ZeroDivisionError), lock.holding(NAME, "1"):
        raise ZeroDivisionError
    with lock.holding(NAME, "0"):
        assert os.environ[NAME] == "0"


def test_calls_that_need_the_same_overlap(before: str | None) -> None:
    lock = EnvironmentLock()
    with lock.holding(NAME, "1"), lock.holding("MOE_PLUGIN_ASCEND_OTHER", "0"):
        with lock.holding(NAME, "1"):
            pass
        assert os.environ[NAME] == "1"
    assert "MOE_PLUGIN_ASCEND_OTHER" not in os.environ


def test_a_call_that_needs_another_value_waits(before: str | None) -> None:
    lock, entered = EnvironmentLock(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        entered.set()
        with lock.holding(NAME, "0"):
            seen.append(os.environ[NAME])

    thread = threading.Thread(target=other)
    with lock.holding(NAME, "1"):
        thread.start()
        entered.wait()
        time.sleep(0.05)
        assert (seen, os.environ[NAME]) == ([], "1")
    thread.join()
    assert seen == ["0"]


def test_threads_with_different_needs_never_see_each_other(before: str | None) -> None:
    lock, wrong = EnvironmentLock(), []

    def call(value: str) -> None:
        for _ in range(200):
            with lock.holding(NAME, value):
                seen = {os.environ[NAME]}
                time.sleep(0)
                seen.add(os.environ[NAME])
            if seen != {value}:
                wrong.append((value, seen))

    threads = [threading.Thread(target=call, args=(str(number % 2),)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
