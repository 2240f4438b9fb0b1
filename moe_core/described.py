"""A machine that was described and not probed: what nobody can know is an error, what no plugin knows is told."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from moe_core.environment import PRESETS, Environment
from moe_core.errors import SpecError, did_you_mean
from moe_core.specs import PluginSpec
from moe_core.vocabulary import ANY, DEVICE_TYPES, arch_order, require_word

#: A generation of CUDA devices, from their compute capability: 9.0 is `sm90`, 12.0 `sm120`.
_CUDA_ARCH = re.compile("sm([1-9][0-9]|1[0-9][0-9])")
#: Where device types and generations are from that are not known here.
OF_PLUGINS = "come with plugins that name them; moe-core list-backends shows which are installed"


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
    _require_known(device, known, f"{where} 'device_type'")
    if not arch or _is_cudas(environment):
        return
    archs = _archs_named(plugins)
    named = archs.get(device, ())
    if arch in named:
        return
    is_cudas = _CUDA_ARCH.fullmatch(arch) is not None
    others = ["cuda"] * is_cudas + [other for other, of_other in archs.items() if arch in of_other]
    if others:
        raise SpecError(f"{where} 'arch': {arch!r} is a generation of {others[0]}, 'device_type' is {device!r}")
    if device == "cuda":
        form = f"expected sm and the compute capability, such as {', '.join(named) or 'sm90'}"
        raise SpecError(f"{where} 'arch': {arch!r} is no generation of cuda, {form}{did_you_mean(arch, named)}")
    if named:
        _require_known(arch, named, f"{where} 'arch'")


def doubts(environment: Environment, plugins: Iterable[PluginSpec]) -> Iterator[str]:
    """What may be a slip of the pen, or lack a plugin: a generation or a device type that no plugin names."""
    plugins = tuple(plugins)
    if unnamed := unnamed_arch(environment, plugins):
        yield unnamed
    device, parts = environment.device_type, [p for plugin in plugins for p in (*plugin.dispatchers, *plugin.runners)]
    # What runs on any device runs on the CPU as well as anywhere.
    if device != "cpu" and all(device not in part.devices for part in parts):
        yield (
            f"no installed plugin has anything made for {device}, so that only what runs on any device serves it; "
            "where there is a plugin for it, install that: moe-core list-backends shows which are"
        )


def unasked(environment: Environment, asked: Mapping[str, Collection[str]]) -> Iterator[str]:
    """The names in a described machine that no plugin asks for: what is said of them has no effect.

    Presets say what is on the machine, whichever plugins there are.

    Args:
        environment: The machine.
        asked: `packages`, `variables` and `programs` -> the names that plugins ask for.
    """
    if environment.source in ("probed", *(preset.source for preset in PRESETS.values())):
        return
    for field, known in asked.items():
        given = dict(getattr(environment, field))
        # Another name does not mean what is there under its own.
        strangers = [f"{name}{_perhaps(name, {*known} - {*given})}" for name in given if name not in known]
        if strangers:
            how = "; packages go by the names that are imported" if field == "packages" else ""
            yield (
                f"environment {environment.source}, field {field!r}: no installed plugin asks for "
                f"{', '.join(strangers)}{how}"
            )


def _perhaps(name: str, words: Iterable[str]) -> str:
    meant = did_you_mean(name, words).removeprefix("; ")
    return f" ({meant})" if meant else ""


def _require_known(word: str, words: Iterable[str], where: str) -> None:
    try:
        require_word(word, words, where)
    except SpecError as error:
        raise SpecError(f"{error}; others {OF_PLUGINS}") from None


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
