"""Plugins that exist as declarations only: what the cases register, and runners for devices that are not here."""

from __future__ import annotations

import types

from fakes import fake_plugin, runner

from moe_core.hookspecs import hookimpl
from moe_core.quant import FP8_BLOCK128, NVFP4
from moe_core.specs import PluginSpec, Requirement

#: Runner name -> scheme and device generations; neither supports sm75.
RESTRICTED_RUNNERS = {"grouped_fp8": (FP8_BLOCK128, ("sm90", "sm100")), "masked_fp4": (NVFP4, ("sm100", "sm103"))}


def restricted_plugin() -> types.ModuleType:
    """A plugin of runners that need recent GPUs and packages which are not installed."""
    runners = [
        runner(
            name,
            schemes=(scheme,),
            weight_layout=name,
            devices=("cuda",),
            archs=archs,
            requirements=(Requirement(module=f"no_such_package_{name}", install=f"pip install {name}"),),
            tier="tuned",
        )
        for name, (scheme, archs) in RESTRICTED_RUNNERS.items()
    ]
    return fake_plugin("restricted", runners=runners)


def make_plugin_module(kind: str) -> types.ModuleType:
    """A plugin that declares nothing (`good`), raises while declaring (`raises`) or has no hook (`lacks`)."""
    module = types.ModuleType("case_plugin")
    module.plugin_name = "?"  # type: ignore[attr-defined]

    @hookimpl
    def declare_backends() -> PluginSpec:
        if kind == "raises":
            raise RuntimeError("broken on purpose")
        return PluginSpec(name=str(module.plugin_name), hook_api=1)

    if kind != "lacks":
        module.declare_backends = declare_backends  # type: ignore[attr-defined]
    return module
