"""The built wheel: what is in it, what it declares, and that its command runs. Works without network."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_EXTRAS = PROJECT["optional-dependencies"].values()
REQUIREMENTS = [Requirement(line) for group in (PROJECT["dependencies"], *_EXTRAS) for line in group]


def _run(*arguments: str | Path, site: Path | None = None, cwd: Path) -> str:
    """Standard output of a command that must succeed; `site` is a package folder put before the installed ones."""
    environment = os.environ | ({"PYTHONPATH": str(site)} if site else {})
    done = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments} exited {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def _pip(*arguments: str | Path, cwd: Path) -> None:
    _run(sys.executable, "-m", "pip", "--quiet", *arguments, "--no-deps", "--no-index", cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-build-isolation", "--wheel-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A folder with the wheel installed in it, and nothing else."""
    target = wheel.parent / "site"
    _pip("install", "--target", target, wheel, cwd=wheel.parent)
    return target


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    dist_info = f"moe_core-{PROJECT['version']}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"moe_core", dist_info}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "moe_core").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert "moe_core/py.typed" in names
    assert f"{dist_info}/licenses/LICENSE" in names


def test_entry_points(site: Path) -> None:
    (declared,) = site.glob("moe_core-*.dist-info/entry_points.txt")
    parser = configparser.ConfigParser()
    parser.read(declared, encoding="utf-8")
    assert parser["console_scripts"]["moe-core"] == "moe_core.cli:main"
    assert parser["moe_core.backends"]["torch"] == "moe_core.backends.torch.plugin"


def test_installed_package_is_the_one_imported(site: Path, tmp_path: Path) -> None:
    found = _run(sys.executable, "-c", "import moe_core; print(moe_core.__file__)", site=site, cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(site)


def test_installed_command_lists_the_built_in_backend(site: Path, tmp_path: Path) -> None:
    listed = _run(site / "bin" / "moe-core", "list-backends", "--no-probe", site=site, cwd=tmp_path)
    assert "torch" in listed


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_reference_environment_pins_every_requirement(requirement: Requirement) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert Version(pins[requirement.name]) in requirement.specifier
