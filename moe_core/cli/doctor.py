"""`moe-core doctor`: one screen about this machine for a bug report, and what to install."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from typing import Any

import attrs
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from moe_core.cli.backend_status import Backend, allowed_plugins, backends_on, parts_of
from moe_core.cli.foreign_variables import ForeignVariable, foreign_variables
from moe_core.cli.options import AsJson
from moe_core.cli.output import fields, print_json, stdout, verdict
from moe_core.cli.to_install import install_hints, to_install
from moe_core.cli.word_table import WordTable
from moe_core.environment import Environment
from moe_core.manager import default_manager
from moe_core.specs import Requirement

SCHEMA = 1
_OWN_PACKAGES = ("moe-core", "torch", "pluggy")


@attrs.frozen
class Package:
    """One distribution that a plugin asks for, on this machine.

    Attributes:
        module: Its import name.
        found: Its version, "" if unknown, None if it is not installed.
        needed: Lowest version that some plugin needs -> the plugins.
        missing: Plugins that it is missing for, or too old for.
        install: What to type to get it, a line for each build that plugins want; "" where that is not known.
    """

    module: str
    found: str | None
    needed: dict[str, list[str]]
    missing: tuple[str, ...]
    install: str


def doctor(
    as_json: AsJson = False,
) -> None:
    """Describe this machine, and what plugins miss on it.

    Device, packages against what plugins need, plugins that are broken, variables of other projects without effect.
    """
    manager = default_manager()
    environment = manager.probe()
    backends = backends_on(manager, environment, probed=True)
    packages = _packages(backends, environment)
    variables = foreign_variables(os.environ)
    if as_json:
        print_json(_json(environment, backends, packages, variables))
    else:
        stdout().print(_view(environment, backends, packages, variables))
    if any(backend.failure for backend in backends):
        raise typer.Exit(1)


def _requirements(backends: list[Backend]) -> Iterator[tuple[str, Requirement]]:
    """Plugin and requirement, each pair once."""
    pairs = [
        (backend.found.name, requirement)
        for backend in backends
        if backend.spec is not None
        for part in (backend.spec, *parts_of(backend.spec))
        for requirement in part.requirements
    ]
    yield from dict.fromkeys(pairs)


def _packages(backends: list[Backend], environment: Environment) -> list[Package]:
    by_module: dict[str, list[tuple[str, Requirement]]] = {}
    for plugin, requirement in _requirements(backends):
        by_module.setdefault(requirement.module, []).append((plugin, requirement))
    return [_package(module, asked, backends, environment) for module, asked in sorted(by_module.items())]


def _package(
    module: str, asked: list[tuple[str, Requirement]], backends: list[Backend], environment: Environment
) -> Package:
    needed: dict[str, list[str]] = {}
    for plugin, requirement in asked:
        # A plugin may want several builds of one module, of any version each.
        plugins = needed.setdefault(requirement.minimum, [])
        if plugin not in plugins:
            plugins.append(plugin)
    missing = [
        backend.found.name
        for backend in backends
        if any(
            reason.code in ("package", "version") and reason.needs.partition(" ")[0] == module
            for reasons in backend.reasons.values()
            for reason in reasons
        )
    ]
    # Plugins may want different builds of one module.
    hints = install_hints((requirement for _, requirement in asked), environment)
    return Package(module, environment.version(module), needed, tuple(missing), "\n".join(hints))


def _own() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in _OWN_PACKAGES}}


def _view(
    environment: Environment, backends: list[Backend], packages: list[Package], variables: list[ForeignVariable]
) -> RenderableType:
    device = " ".join(filter(None, (environment.device_type, environment.arch)))
    parts = (device, environment.device_name, environment.thread_words, environment.driver)
    machine = {
        "device": ", ".join(dict.fromkeys(filter(None, parts))),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "versions": ", ".join(f"{name} {version}" for name, version in _own().items()),
        "variables": ", ".join(f"{name}={value}" for name, value in environment.variables),
        "programs": ", ".join(f"{name} {path or 'not found'}" for name, path in environment.programs),
        "plugins": allowed_plugins(),
    }
    plugins = WordTable("PLUGIN", "VERSION", "STATUS")
    for backend in backends:
        plugins.add_row(backend.found.name, backend.found.version or "-", verdict(backend.summary))
    views: list[RenderableType] = [fields(machine), Text(), plugins]
    if packages:
        views += [Text(), _package_table(packages)]
    if variables:
        rows = WordTable("VARIABLE OF ANOTHER PROJECT", "DECIDES THERE", "SAY HERE")
        for variable in variables:
            rows.add_row(f"{variable.name}={variable.value}", variable.effect, variable.here)
        views += [Text(), rows]
    for heading, hints in to_install(backends, environment).items():
        if hints:
            views += [Text(f"\n{heading}", style="bold"), fields({f"  {name}": text for name, text in hints.items()})]
    return Group(*views)


def _package_table(packages: list[Package]) -> RenderableType:
    rows = WordTable("PACKAGE", "FOUND", "NEEDED", "MISSING FOR")
    for package in packages:
        found = "-" if package.found is None else package.found or "unknown"
        needed = [
            f"{f'>= {minimum}' if minimum else 'any'} by {', '.join(plugins)}"
            for minimum, plugins in package.needed.items()
        ]
        rows.add_row(package.module, found, "\n".join(needed), ", ".join(package.missing) or "-")
    return rows


def _json(
    environment: Environment, backends: list[Backend], packages: list[Package], variables: list[ForeignVariable]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "environment": environment.to_json(),
        "versions": _own(),
        "plugins": [
            {
                "name": backend.found.name,
                "distribution": backend.found.distribution,
                "version": backend.found.version,
                "status": backend.status,
                "problem": backend.problem,
                "traceback": backend.failure.traceback if backend.failure else "",
            }
            for backend in backends
        ],
        "packages": [attrs.asdict(package) for package in packages],
        "variables": [attrs.asdict(variable) for variable in variables],
    }
