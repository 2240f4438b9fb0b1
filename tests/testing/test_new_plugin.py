"""`moe-core new-plugin`: what it writes installs, lists, resolves and passes the kit, unchanged."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_core.cli import main
from moe_core.cli.new_plugin import plugin_files
from moe_core.manager import ALLOW_LIST_VARIABLE

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "minimal_plugin"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def _call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["new-plugin", *words])
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return _call


def _run(*arguments: str | Path, site: Path, cwd: Path) -> str:
    path, plugins = os.pathsep.join(map(str, (site, ROOT))), f"{os.environ[ALLOW_LIST_VARIABLE]},acme"
    environment = os.environ | {"PYTHONPATH": path, ALLOW_LIST_VARIABLE: plugins, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{arguments} exited {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_a_new_plugin_installs_lists_resolves_and_passes_the_kit(call: Call, tmp_path: Path) -> None:
    folder, site = tmp_path / "acme", tmp_path / "site"
    code, out, _ = call("acme", "--output", str(folder))
    assert code == 0
    assert f"wrote {folder}" in out
    pip = ("pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", site, folder)
    _run(*pip, site=site, cwd=tmp_path)
    rows = json.loads(_run("moe_core", "list-backends", "--no-probe", "--json", site=site, cwd=tmp_path))["backends"]
    (row,) = [row for row in rows if row["name"] == "acme"]
    assert (row["status"], row["distribution"]) == ("ready", "moe-plugin-acme")
    words = ("resolve", "--environment", "cpu", "--runner-backend", "acme:acme", "--model", ROOT / "examples/tiny_moe")
    assert "acme:acme.contiguous" in _run("moe_core", *words, site=site, cwd=tmp_path)
    tested = _run("pytest", "-q", "-p", "no:cacheprovider", folder / "tests", site=site, cwd=folder)
    assert "passed" in tested
    assert not {"failed", "skipped", "error"} & set(tested.split())


def test_the_minimal_plugin_is_what_the_command_writes() -> None:
    written = plugin_files("toy_accelerator")
    found = {
        str(path.relative_to(EXAMPLE)): path.read_text(encoding="utf-8")
        for path in EXAMPLE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == written


def test_the_conformance_test_of_a_new_plugin_is_short() -> None:
    assert len(plugin_files("acme")["tests/test_conformance.py"].splitlines()) <= 20


def test_the_longest_name_can_be_declared() -> None:
    # Names that a plugin makes of its own are longer.
    text = plugin_files("a" * 53)[f"moe_plugin_{'a' * 53}/plugin.py"]
    names = re.findall(r"a{53}\w*", text)
    assert max(map(len, names)) == 64


@pytest.mark.error_path
@pytest.mark.parametrize("name", ["Acme", "2fast", "a-b", "", "a" * 54])
def test_a_name_that_cannot_be_imported(call: Call, name: str, tmp_path: Path) -> None:
    code, _, err = call(name, "--output", str(tmp_path / "folder"))
    assert code == 2
    assert "expected lower-case letters" in err
    assert not (tmp_path / "folder").exists()


@pytest.mark.error_path
def test_nothing_is_overwritten_and_no_name_is_taken_twice(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    code, _, err = call("acme", "--output", str(tmp_path))
    assert code == 2
    assert "nothing was written" in err
    code, _, err = call("torch", "--output", str(tmp_path / "torch"))
    assert code == 2
    assert "installed already" in err


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("name", "message"),
    [("class", "is a keyword of Python"), ("acme_", "to a letter or a digit"), ("a" * 300, "at most 53")],
)
def test_names_that_files_or_packages_cannot_have(
    call: Call, name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(name)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert message in err


@pytest.mark.error_path
def test_a_folder_that_cannot_be_made(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = call("acme", "--output", str(tmp_path / "file" / "acme"))
    assert code == 2
    assert "acme cannot be written (Not a directory); name another with --output" in err


@pytest.mark.error_path
def test_what_is_to_be_typed_next_is_quoted(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "it's a folder"
    code, out, _ = call("acme", "-o", str(folder))
    _, install, check, *_ = out.splitlines()
    assert code == 0
    assert shlex.split(install)[-1] == f"{folder}[test]"
    assert shlex.split(check.partition("pytest ")[2]) == [str(folder)]
