"""Libraries that cannot be imported, and functions of another release."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moe_core.errors import PluginError
from moe_core.kernel_library import import_library, require_keywords
from moe_core.specs import Requirement

LIBRARY = Requirement(module="some_kernels", install="install a build for your torch")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, LIBRARY.module, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / f"{LIBRARY.module}.py"


def test_what_a_library_prints_is_dropped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.write_text("print('a line that nobody asked for')\nFOUND = 1\n")
    assert import_library(LIBRARY).FOUND == 1
    assert capsys.readouterr().out == ""


@pytest.mark.error_path
@pytest.mark.parametrize(
    "error",
    [
        "ImportError: libkernels.so.3",
        "AssertionError: no toolkit",
        "OSError: symbol",
        "SystemExit: 1",
        "BaseException: x",
    ],
)
def test_a_library_that_cannot_be_imported_says_why(folder: Path, error: str) -> None:
    name, _, text = error.partition(": ")
    folder.write_text(f"raise {name}({text!r})\n")
    message = f"some_kernels of unknown version cannot be imported beside torch 2.*: {error}; install a build for your"
    with pytest.raises(PluginError, match=message):
        import_library(LIBRARY)


@pytest.mark.error_path
def test_an_interrupt_while_a_library_is_imported_passes(folder: Path) -> None:
    folder.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        import_library(LIBRARY)


def function(x: Any, handle: Any, *, scale: Any = None) -> None: ...


def test_a_function_that_takes_what_is_passed() -> None:
    assert require_keywords(function, "x", "handle", of=LIBRARY) is function
    assert require_keywords(function, "x", "handle", "scale", of=LIBRARY) is function


def test_a_function_that_does_not_tell() -> None:
    assert require_keywords(max, "x", of=LIBRARY) is max


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("x", "handle", "hook"), "unexpected keyword argument 'hook'"),
        (("x",), "missing a required argument: 'handle'"),
    ],
)
def test_a_function_of_another_release(names: tuple[str, ...], problem: str) -> None:
    with pytest.raises(PluginError, match=rf"some_kernels .*: function: .*{problem}; .*install a build for your torch"):
        require_keywords(function, *names, of=LIBRARY)
