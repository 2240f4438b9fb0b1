"""moe-core: one Mixture-of-Experts layer on whatever hardware and quantization its user has.

The names below are loaded when they are first used, so that `import moe_core` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_core.activation import ActivationSpec
    from moe_core.environment import Environment, load_environment
    from moe_core.hookspecs import hookimpl
    from moe_core.layer import MoELayer
    from moe_core.manager import BackendManager, default_manager
    from moe_core.payloads import ExpertGroup, RawWeights
    from moe_core.placement import ExpertPlacement
    from moe_core.planner import make_plan, plan_layers
    from moe_core.probing import probe_environment
    from moe_core.quant import LayerQuant, QuantScheme
    from moe_core.request import LayerRequest, Workload
    from moe_core.resolver import resolve

    __version__: str

_HOMES = {
    "ActivationSpec": "activation",
    "BackendManager": "manager",
    "Environment": "environment",
    "ExpertGroup": "payloads",
    "ExpertPlacement": "placement",
    "LayerQuant": "quant",
    "LayerRequest": "request",
    "MoELayer": "layer",
    "QuantScheme": "quant",
    "RawWeights": "payloads",
    "Workload": "request",
    "default_manager": "manager",
    "hookimpl": "hookspecs",
    "load_environment": "environment",
    "make_plan": "planner",
    "plan_layers": "planner",
    "probe_environment": "probing",
    "resolve": "resolver",
}

__all__ = [
    "ActivationSpec",
    "BackendManager",
    "Environment",
    "ExpertGroup",
    "ExpertPlacement",
    "LayerQuant",
    "LayerRequest",
    "MoELayer",
    "QuantScheme",
    "RawWeights",
    "Workload",
    "default_manager",
    "hookimpl",
    "load_environment",
    "make_plan",
    "plan_layers",
    "probe_environment",
    "resolve",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module (PEP 562), and the version from the installed distribution."""
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'moe_core' has no attribute {name!r}")
    return getattr(importlib.import_module(f"moe_core.{_HOMES[name]}"), name)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("moe-core")
    except metadata.PackageNotFoundError as error:
        raise AttributeError("moe-core is not installed, so that it has no version") from error


def __dir__() -> list[str]:
    """The public names, for completion."""
    return __all__
