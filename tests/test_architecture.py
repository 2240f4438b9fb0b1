"""Rules that hold for every source file of the core and of the plugins in this repository."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_core.environment import PRESETS

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "moe_core"
PACKAGES = [CORE, *sorted(ROOT.glob("plugins/*/moe_plugin_*"))]
FILES = {str(path.relative_to(ROOT)): path for package in PACKAGES for path in sorted(package.rglob("*.py"))}

# A longer file has more than one duty.
MAX_LINES_PER_FILE = 450
MAX_MEAN_LINES = 220


def _line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _imported_names(tree: ast.Module) -> Iterator[str]:
    """Absolute dotted names that a file imports, wherever in the file; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_core_submodule(dotted: str) -> bool:
    _, _, inner = dotted.partition(".")
    top = inner.partition(".")[0]
    return bool(top) and ((CORE / f"{top}.py").exists() or (CORE / top).is_dir())


def _declarative_modules() -> list[str]:
    """The modules that ruff keeps free of torch, read from its configuration, as far as they exist."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    (pattern,) = (key for key, rules in config["per-file-ignores"].items() if rules == ["TID253"])
    names = re.fullmatch(r"!moe_core/\{(.+)\}\.py", pattern)
    assert names is not None, f"unexpected pattern {pattern!r} in the TID253 rule of pyproject.toml"
    # A star matches folders too, as it does for ruff.
    files = [path for name in names[1].split(",") for path in sorted(CORE.glob(f"{name.replace('*', '**/*')}.py"))]
    return [".".join(path.relative_to(CORE.parent).with_suffix("").parts).removesuffix(".__init__") for path in files]


@pytest.mark.parametrize("name", FILES)
def test_file_is_short(name: str) -> None:
    lines = _line_count(FILES[name])
    assert lines <= MAX_LINES_PER_FILE, f"{name} has {lines} lines: split it by duty"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_files_are_short_on_average(package: Path) -> None:
    counts = [_line_count(path) for path in package.rglob("*.py")]
    assert sum(counts) / len(counts) <= MAX_MEAN_LINES


@pytest.mark.parametrize("name", FILES)
def test_imports_of_first_party_packages(name: str) -> None:
    path = FILES[name]
    own_plugin = next((part for part in path.relative_to(ROOT).parts if part.startswith("moe_plugin_")), None)
    for dotted in _imported_names(ast.parse(path.read_text(encoding="utf-8"))):
        top = dotted.partition(".")[0]
        if top.startswith("moe_plugin_"):
            assert top == own_plugin, (
                f"{name} imports {dotted}: the core imports no plugin, plugins none but themselves"
            )
        if own_plugin is None and top == "moe_core":
            # The root re-exports lazily for users; inside, it would hide which module is needed.
            assert _is_core_submodule(dotted), f"{name} imports {dotted} from the package root"


@pytest.mark.parametrize("name", FILES)
def test_no_assert_guards_behaviour(name: str) -> None:
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert not lines, f"{name} asserts in lines {lines}: gone under python -O, raise instead"


def test_declarative_modules_import_without_torch() -> None:
    modules = _declarative_modules()
    assert modules
    script = "\n".join(
        [
            "import importlib, sys",
            "for name in sys.argv[1:]:",
            "    importlib.import_module(name)",
            "    if 'torch' in sys.modules:",
            "        raise SystemExit(f'importing {name} imported torch')",
        ]
    )
    run = subprocess.run(
        [sys.executable, "-c", script, *modules], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_no_packages_that_nothing_asks_for(name: str) -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in FILES.values())
    asked = set(re.findall(r'Requirement\(\s*module="(\w+)"', sources))
    assert {module for module, _ in PRESETS[name].packages} <= asked
