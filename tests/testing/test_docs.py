"""The pages for authors: the tutorial runs, the reference is what the docstrings say, every link leads somewhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from moe_core.cli import main
from moe_core.testing import Kit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIAL = DOCS / "writing_a_backend.md"
#: Every page that people read.
PAGES = sorted(
    {*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("plugins/*/README.md"), *ROOT.glob("examples/*/README.md")}
)


def _reference() -> Any:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    blocks = re.findall(r"```python( title=\"acme_plugin\.py\")?\n(.*?)```", text, flags=re.DOTALL)
    source = "\n".join(code for title, code in blocks if title)
    (tmp_path / "acme_plugin.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names: dict[str, Any] = {}
    for title, code in blocks:
        if not title:
            exec(code, names)
    importlib.invalidate_caches()
    sys.modules.pop("acme_plugin", None)
    (message,) = re.findall(r"It prints, among others:\n\n```\n(.*?)```", text, flags=re.DOTALL)
    assert message in capsys.readouterr().out


def test_the_dispatcher_of_the_tutorial_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((title, code),) = [block for block in _blocks("writing_a_backend.md") if block[0] == "acme_fabric.py"]
    (tmp_path / title).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    # The whole kit tries every scheme of the core's runners with it.
    checks = {"specs", "router_weights", "missing_experts", "bad_ids", "expert_copies", "dispatched_form", "round_trip"}
    cases = [case for case in Kit("acme_fabric", device="cpu", quick=True).cases() if case.check in checks]
    assert {case.check for case in cases} == checks
    results = [case.run() for case in cases]
    sys.modules.pop("acme_fabric", None)
    assert [result for result in results if result.status != "passed"] == []


def _blocks(page: str) -> list[tuple[str, str]]:
    """Title and text of every Python block."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"```python(?: title=\"(\w+\.py)\")?\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", ["expert_parallel.md", "quantization.md", "another_machine.md"])
def test_a_how_to_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for title, code in _blocks(page):
        if not title:
            exec(code, names)
    printed = capsys.readouterr().out
    text = (DOCS / page).read_text(encoding="utf-8")
    for message in re.findall(r"It prints(?:, among others)?:\n\n```\n(.*?)```", text, flags=re.DOTALL):
        assert message.strip() in printed


def test_the_program_for_several_ranks_runs(tmp_path: Path) -> None:
    ((title, code),) = [block for block in _blocks("expert_parallel.md") if block[0]]
    (tmp_path / title).write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / title]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 0 holds experts [0, 1, 2]; any: torch:torch_alltoall.standard + torch:torch.standard" in done.stdout
    assert "rank 1 holds experts [3, 4, 5]" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_is_endless(page: Path) -> None:
    # Tables and what programs print cannot be broken.
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in text.splitlines() if len(line) > 140 and not line.startswith("|")] == []


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([\w.]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8")))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in ("index.md", "expert_parallel.md", "quantization.md", "another_machine.md"):
        assert f"(docs/{page})" in readme


@pytest.mark.parametrize("name", ["hooks.md", "capabilities.md", "payloads.md"])
def test_the_reference_is_what_the_docstrings_say(name: str) -> None:
    page = _reference().PAGES[name]()
    assert (DOCS / name).read_text(encoding="utf-8") == page, "run docs/make_reference.py"


def test_every_field_of_a_declaration_is_documented() -> None:
    module = _reference()
    page = module.capabilities_page()
    for declaration in module.DECLARATIONS:
        section = page.partition(f"## `{declaration.__name__}`")[2].partition("\n## ")[0]
        listed = {
            name.strip()
            for names in re.findall(r"^\* `([\w, ]+)`:", section, re.MULTILINE)
            for name in names.split(",")
        }
        assert listed == {field.name for field in attrs.fields(declaration)}, declaration.__name__


def test_the_map_of_the_code_names_every_module_and_no_other() -> None:
    core = ROOT / "moe_core"
    named = set(re.findall(r"`([a-z_/]+)`", (DOCS / "code.md").read_text(encoding="utf-8")))
    folders = {f"{path.name}/" for path in core.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert (folders | {path.stem for path in core.glob("[a-z]*.py")}) - named == set()
    beside = {name for name in named if "/" in name and not (ROOT / name).exists()}
    inside = {str(path.relative_to(core)) for path in core.rglob("*")}
    parts = {part for path in inside for part in (path, path.removesuffix(".py"), Path(path).name)}
    assert {name for name in beside if name.rstrip("/") not in parts} == set()


def _anchors(page: Path) -> set[str]:
    """What links may name of a page: its headings in small letters, a dash for each space, other signs left out."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in _anchors(linked), f"{target}#{anchor}"


def test_what_a_command_prints_is_what_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that the page about other machines explains line by line."""
    page = (DOCS / "another_machine.md").read_text(encoding="utf-8")
    ((command, printed),) = re.findall(
        r"`moe-core (resolve [^`]+)` prints:\n\n```text\n(.*?)```", page, flags=re.DOTALL
    )
    # Pages have the width of a terminal.
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(shlex.split(command))
    # Of the machine that ran it, not of this one.
    said = re.sub(r"torch \d\S*", "torch", capsys.readouterr().out)
    assert said == re.sub(r"torch \d\S*", "torch", printed)
