"""The premise of running tests under `python -O`: asserts of test modules still fire, those of package code do not."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.error_path


def test_an_assert_in_a_test_module_fires() -> None:
    # Plain Python drops it under -O, and pytest.raises would then fail: pytest's rewriting is what keeps it.
    with pytest.raises(AssertionError):
        assert not sys.path, "rewritten by pytest"


def test_child_processes_run_at_the_same_level() -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.flags.optimize)"], capture_output=True, text=True, check=True
    )
    assert int(child.stdout) == sys.flags.optimize
