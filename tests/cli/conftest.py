"""Processes that see this checkout and, if asked, plugins from checked-in metadata folders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from tiny_models import write_tiny_qwen

from moe_core.cli import main
from moe_core.manager import ALLOW_LIST_VARIABLE, default_manager

SITES = Path(__file__).parent / "sites"
ROOT = Path(__file__).parents[2]

Finished = subprocess.CompletedProcess[str]
Command = Callable[..., Finished]


def _allowed(*sites: str) -> str:
    """The allow-list of plugins, extended by those of `sites`."""
    distributions = metadata.distributions(path=[str(SITES / site) for site in sites])
    names = [point.name for distribution in distributions for point in distribution.entry_points]
    return ",".join([os.environ[ALLOW_LIST_VARIABLE], *names])


def _run(arguments: list[str], sites: tuple[str, ...], **variables: str) -> Finished:
    path = os.pathsep.join([str(ROOT), *(str(SITES / site) for site in sites)])
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environ, "PYTHONPATH": path, ALLOW_LIST_VARIABLE: _allowed(*sites), **variables},
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="session")
def python() -> Command:
    """Run Python code in a process; `sites` names folders of plugins."""
    return lambda code, *, sites=(), **variables: _run(["-c", code], sites, **variables)


@pytest.fixture(scope="session")
def moe_core() -> Command:
    """Run the command line in a process; `sites` names folders of plugins."""
    return lambda *words, sites=(), **variables: _run(["-m", "moe_core", *words], sites, **variables)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit code, stdout, stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def _call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return _call


def _seen_here(monkeypatch: pytest.MonkeyPatch, site: str) -> Iterator[None]:
    monkeypatch.syspath_prepend(SITES / site)
    monkeypatch.setenv(ALLOW_LIST_VARIABLE, _allowed(site))
    default_manager.cache_clear()
    yield
    default_manager.cache_clear()


@pytest.fixture
def with_vendors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process sees the vendor-like plugins too, and forgets them again."""
    yield from _seen_here(monkeypatch, "vendors")


@pytest.fixture
def with_failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same of the plugin that fails in the forward."""
    yield from _seen_here(monkeypatch, "failing")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random MoE model of bytes, without a tokenizer."""
    pytest.importorskip("transformers")
    target = tmp_path_factory.mktemp("model")
    write_tiny_qwen(target, num_hidden_layers=3, mlp_only_layers=[1])
    return target
