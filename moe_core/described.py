"""A machine that was described and not probed: a device type or a generation that nobody knows is an error."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moe_core.environment import PRESETS, Environment
from moe_core.errors import SpecError, did_you_mean
from moe_core.specs import PluginSpec
from moe_core.vocabulary import ANY, DEVICE_TYPES, arch_order, require_word

#: A generation of CUDA devices, from their compute capability: 9.0 is `sm90`, 12.0 `sm120`.
_CUDA_ARCH = re.compile("sm([1-9][0-9]|1[0-9][0-9])")


def check_described(environment: Environment, plugins: Iterable[PluginSpec]) -> None:
    """Raise `SpecError` for a device type or a generation that nobody knows; what was probed is taken as it is.

    A generation is known if a plugin names it for that device type; of CUDA devices, which say it themselves, each of
    the right form is, see `unnamed_arch`. Where no plugin names any for a device type, only those of other devices are
    wrong.
    """
    if environment.source == "probed":
        return
    plugins, device, arch = tuple(plugins), environment.device_type, environment.arch
    where = f"environment {environment.source}, field"
    known = (*DEVICE_TYPES, *(device for plugin in plugins for device in plugin.device_types))
    require_word(device, known, f"{where} 'device_type'")
    archs = _archs_named(plugins)
    named = archs.get(device, ())
    if not arch or arch in named or _is_cudas(environment):
        return
    is_cudas = _CUDA_ARCH.fullmatch(arch) is not None
    others = ["cuda"] * is_cudas + [other for other, of_other in archs.items() if arch in of_other]
    if others:
        raise SpecError(f"{where} 'arch': {arch!r} is a generation of {others[0]}, 'device_type' is {device!r}")
    if device == "cuda":
        form = f"expected sm and the compute capability, such as {', '.join(named) or 'sm90'}"
        raise SpecError(f"{where} 'arch': {arch!r} is no generation of cuda, {form}{did_you_mean(arch, named)}")
    if named:
        require_word(arch, named, f"{where} 'arch'")


def unnamed_arch(environment: Environment, plugins: Iterable[PluginSpec]) -> str:
    """What to know of a described CUDA generation that may exist and that nothing names, "" of any other machine."""
    arch, presets = environment.arch, {preset.arch for preset in PRESETS.values() if preset.device_type == "cuda"}
    named = sorted({*presets, *_archs_named(plugins).get("cuda", ())}, key=arch_order)
    if environment.source == "probed" or not _is_cudas(environment) or arch in named:
        return ""
    below = [other for other in named if arch_order(other) < arch_order(arch)]
    nearest = ", ".join((*below[-1:], *named[len(below) :][:1]))
    return (
        f"environment {environment.source}: no plugin names {arch}, so that only what takes any generation serves it; "
        f"the nearest that are named: {nearest}"
    )


def _is_cudas(environment: Environment) -> bool:
    """Whether it is a CUDA device with a generation that may exist."""
    return environment.device_type == "cuda" and _CUDA_ARCH.fullmatch(environment.arch) is not None


def _archs_named(plugins: Iterable[PluginSpec]) -> dict[str, tuple[str, ...]]:
    """Device type -> the generations that plugins name for it, in their order."""
    found: dict[str, set[str]] = {}
    for plugin in plugins:
        for generation in plugin.generations:
            found.setdefault(generation.device_type, set()).add(generation.arch)
        for part in (*plugin.dispatchers, *plugin.runners):
            for device in part.devices:
                found.setdefault(device, set()).update(part.archs)
    return {device: tuple(sorted(archs, key=arch_order)) for device, archs in found.items() if device != ANY}
