"""Which module of a plugin makes a weight layout: for plugins with several, none of which is imported before a hook."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from moe_core.errors import PluginError

if TYPE_CHECKING:
    from moe_core.payloads import ExpertsFn, PreparedWeights, RawWeights
    from moe_core.plan import MoEPlan, Route


class LayoutModule(Protocol):
    """What such a module has: the two hooks about weights, for the plans with its layout."""

    def prepare(self, plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
        """As `process_weights_after_loading`."""

    def bind(self, plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
        """As `fused_experts`, for a route that has a dispatcher."""


def layout_module(layouts: Mapping[str, str], layout: str) -> LayoutModule:
    """The module that prepares weights in a layout and binds experts to them.

    Args:
        layouts: Weight layout -> full name of its module.
        layout: The plan's `weight_layout`.

    Raises:
        PluginError: It is none of these; the plan is another plugin's, whose tag these modules must not write.
    """
    if layout not in layouts:
        raise PluginError(f"this plugin makes the weight layouts {', '.join(layouts)}; the plan asks for {layout!r}")
    return cast(LayoutModule, importlib.import_module(layouts[layout]))
