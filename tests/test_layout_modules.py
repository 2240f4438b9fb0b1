"""Modules of weight layouts: found by name, imported late, and none for another plugin's plan."""

from __future__ import annotations

import sys

import pytest

from moe_core.errors import PluginError
from moe_core.layout_modules import layout_module

LAYOUTS = {"toy_rows": "colorsys", "toy_tiles": "no_such_module"}


def test_only_the_module_of_the_layout_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert layout_module(LAYOUTS, "toy_rows") is sys.modules["colorsys"]


@pytest.mark.error_path
def test_a_layout_of_another_plugin_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PluginError, match="makes the weight layouts toy_rows, toy_tiles; the plan asks for 'other'"):
        layout_module(LAYOUTS, "other")
