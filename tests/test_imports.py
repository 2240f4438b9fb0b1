from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import moe_core

ROOT = Path(moe_core.__file__).parent
#: Modules on the way of tensors; everything else in the root is declarative.
WITH_TENSORS = {"agreement", "bound", "layer", "payloads", "prepared_form", "refill", "routing"}
DECLARATIVE = sorted(
    {path.stem for path in ROOT.glob("*.py")} - WITH_TENSORS - {"__init__", "__main__"}
    | {"backends.torch.plugin", "backends.triton.plugin"}
)

_SCRIPT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy = sorted({"torch", "numpy", "transformers", "triton"} & set(sys.modules))
    if heavy:
        sys.exit(f"{name} imports {heavy}")
"""


def _run(*modules: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *modules],
        capture_output=True,
        text=True,
        cwd=ROOT.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_declarative_half_needs_no_torch() -> None:
    _run("moe_core", *(f"moe_core.{name}" for name in DECLARATIVE))


@pytest.mark.parametrize("name", ["specs", "hookspecs", "backends.torch.plugin", "backends.triton.plugin"])
def test_what_a_plugin_imports_needs_no_torch_by_itself(name: str) -> None:
    _run(f"moe_core.{name}")


def test_public_names() -> None:
    assert sorted(moe_core.__all__) == sorted(moe_core._HOMES)
    assert sorted(dir(moe_core)) == sorted(moe_core.__all__)


@pytest.mark.parametrize("name", sorted(set(moe_core.__all__) - {"MoELayer", "RawWeights", "ExpertGroup"}))
def test_a_public_name_comes_from_its_home(name: str) -> None:
    home = importlib.import_module(f"moe_core.{moe_core._HOMES[name]}")
    assert getattr(moe_core, name) is getattr(home, name)


def test_the_version_needs_no_torch() -> None:
    assert moe_core.__version__ == importlib.metadata.version("moe-core")
    script = "import moe_core, sys; print(moe_core.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout.split() == [moe_core.__version__, "False"]


@pytest.mark.error_path
def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'moe_core' has no attribute 'MoeLayer'"):
        _ = moe_core.MoeLayer  # type: ignore[attr-defined]
