from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

from moe_core.hookspecs import ENTRY_POINT_GROUP
from moe_core.manager import ALLOW_LIST_VARIABLE

#: Times that somebody has measured here must not reach the tests, nor the processes that they start.
CACHES = tempfile.TemporaryDirectory(prefix="moe-core-caches-")
os.environ["XDG_CACHE_HOME"] = CACHES.name

#: Nor must plugins that are installed beside the core. Tests that bring their own extend the list.
BUILT_IN = sorted(p.name for p in metadata.entry_points(group=ENTRY_POINT_GROUP) if p.value.startswith("moe_core."))
os.environ[ALLOW_LIST_VARIABLE] = ",".join(BUILT_IN)

if not torch.cuda.is_available():
    # Triton's kernels are interpreted where no GPU is; that is decided when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def forgotten_compilations() -> Iterator[None]:
    """Compilations of one test do not count in another.

    torch stops at the ninth of a function, and ours share one of its own.
    """
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _size(package: Path) -> str:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in package.rglob("*.py")}
    longest = max(lines, key=lambda path: lines[path])
    total = sum(lines.values())
    return (
        f"size of {package.name}: {total} lines in {len(lines)} files, mean {total // len(lines)}, "
        f"longest {lines[longest]} ({longest.relative_to(package)})"
    )


def pytest_report_header() -> list[str]:
    """What this run stands on, and how large the packages have become: growth shows in every CI log."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "pluggy"))
    packages = [ROOT / "moe_core", *sorted(ROOT.glob("plugins/*/moe_plugin_*"))]
    return [versions, *(_size(package) for package in packages)]
