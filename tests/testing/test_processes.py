"""Processes of the kit end with those that started them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_core.payloads import ExpertGroup
from moe_core.testing import Kit, parallel
from moe_core.testing.parallel import run_cases
from moe_core.testing.ranks import run_on_ranks

#: Far more than a busy machine needs to end a process; what does not end is found by waiting for so long.
_PATIENCE = 60.0


def test_cases_that_hang_end_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_CHUNK", 1)
    before = multiprocessing.active_children()
    results = run_cases(Kit("hangs_plugin", device="cpu", quick=True), jobs=2)
    assert next(results).check == "import"
    started = [process for process in multiprocessing.active_children() if process not in before]
    assert started
    results.close()
    assert not any(process.is_alive() for process in started)


def _hangs(group: ExpertGroup, folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    while True:
        time.sleep(1)


def _starter(folder: str) -> None:
    run_on_ranks(_hangs, [(folder,), (folder,)])


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def _wait(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + _PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    starter = multiprocessing.get_context("forkserver").Process(target=_starter, args=(str(tmp_path),))
    starter.start()
    assert _wait(lambda: len(list(tmp_path.iterdir())) == 2)
    starter.kill()
    starter.join()
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert _wait(lambda: not any(map(_is_alive, ranks)))
