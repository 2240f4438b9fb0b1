"""Which module of a plugin makes a weight layout: for plugins with several, none of which is imported before a hook."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from moe_core.errors import PluginError


def layout_module(layouts: Mapping[str, str], layout: str) -> Any:
    """The module that prepares weights in a layout and binds experts to them.

    Args:
        layouts: Weight layout -> full name of its module.
        layout: The plan's `weight_layout`.

    Raises:
        PluginError: It is none of these; the plan is another plugin's, whose tag these modules must not write.
    """
    if layout not in layouts:
        raise PluginError(f"this plugin makes the weight layouts {', '.join(layouts)}; the plan asks for {layout!r}")
    return importlib.import_module(layouts[layout])
