"""Packages are looked up, never imported."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from moe_core.installed import installed_version


def test_versions_come_from_metadata_without_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_version("probed_library") is None
    (tmp_path / "probed_library").mkdir()
    assert installed_version("probed_library") is None  # a mere folder
    (tmp_path / "probed_library" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert installed_version("probed_library") == ""
    metadata = tmp_path / "other_name-3.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-name\nVersion: 3.1\n")
    (metadata / "top_level.txt").write_text("probed_library\n")
    assert installed_version("probed_library") == "3.1"
    assert "probed_library" not in sys.modules


def test_a_module_without_a_spec_is_there() -> None:
    name = "module_made_by_hand"
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        assert installed_version(name) == ""
    finally:
        del sys.modules[name]
