"""The pages for authors: the tutorial runs, the reference is what the docstrings say, every link leads somewhere."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIAL = DOCS / "writing_a_backend.md"


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


@pytest.mark.parametrize("name", ["hooks.md", "capabilities.md"])
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


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (DOCS / page).read_text(encoding="utf-8")):
        assert (DOCS / target).exists(), target
