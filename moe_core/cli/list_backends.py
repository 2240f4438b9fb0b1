"""`moe-core list-backends`: what is installed, and whether it can run on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import attrs
import typer
from rich.console import Group
from rich.text import Text

from moe_core.cli.backend_status import Backend, allowed_plugins, backends_on, parts_of, why_none
from moe_core.cli.options import AsJson
from moe_core.cli.output import fields, print_error, print_json, stdout, verdict
from moe_core.cli.plan_view import machine_fields
from moe_core.cli.word_table import WordTable
from moe_core.environment import Environment
from moe_core.findings import Reason
from moe_core.manager import default_manager
from moe_core.misses import compact
from moe_core.probing import unprobed_environment
from moe_core.specs import HOOK_API, DispatcherSpec, PluginSpec, RunnerSpec
from moe_core.vocabulary import ANY, TIERS

SCHEMA = 1


def list_backends(
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Look at this machine's devices, which imports torch; or judge by package metadata alone.",
        ),
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a plugin failed to load.")] = False,
    as_json: AsJson = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Add origin, hooks, tiers, every reason, and the tracebacks of failed plugins."
        ),
    ] = False,
) -> None:
    """List the installed backends and whether each can run here."""
    manager = default_manager()
    if probe:
        environment = manager.probe()
    else:
        environment = unprobed_environment(
            manager.modules_required(), manager.variables_read(), manager.programs_started()
        )
    backends = backends_on(manager, environment, probed=probe)
    if as_json:
        print_json(_json(backends, environment, probe))
    else:
        _print(backends, environment, probe, verbose)
    failed = dict.fromkeys(backend.found.name for backend in backends if backend.failure)
    if strict and failed:
        print_error(f"failed plugins: {', '.join(failed)}; see moe-core list-backends -v")
        raise typer.Exit(1)


def _devices(spec: PluginSpec | None) -> str:
    devices = {device for part in parts_of(spec) for device in part.devices} if spec else set()
    return ANY if ANY in devices else ", ".join(sorted(devices))


def _names(parts: Sequence[DispatcherSpec] | Sequence[RunnerSpec]) -> str:
    """`deepep.normal, .low_latency`."""
    return compact(part.short_name for part in parts)


def _print(backends: list[Backend], environment: Environment, probed: bool, verbose: bool) -> None:
    console = stdout()
    if backends:
        plugins, names = _tables(backends)
        console.print(plugins)
        console.print()
        console.print(names)
        if allowed := allowed_plugins():
            console.print(f"plugins that are loaded: {allowed}", style="dim")
    else:
        console.print(why_none())
    if not probed:
        console.print("devices were not looked at: ready means that the required packages are installed", style="dim")
    if verbose:
        console.print(Group(*(_details(backend) for backend in backends)))
        console.print()
        console.print(machine_fields(environment))


def _tables(backends: list[Backend]) -> tuple[WordTable, WordTable]:
    """What each plugin is here, and then the names that it declares, which may be many."""
    plugins = WordTable("NAME", "VERSION", "DEVICE", "STATUS")
    names = WordTable("NAME", "DECLARES", "VARIANTS")
    for backend in backends:
        found, spec = backend.found, backend.spec
        plugins.add_row(found.name, found.version or "-", _devices(spec) or "-", verdict(backend.summary))
        declared = [("dispatchers", _names(spec.dispatchers)), ("runners", _names(spec.runners))] if spec else []
        for index, row in enumerate(row for row in declared if row[1]):
            names.add_row("" if index else found.name, *row)
    return plugins, names


def _details(backend: Backend) -> Group:
    found = backend.found
    rows = {
        "origin": f"{found.distribution} {found.version}, entry point {found.value}".removeprefix(" , "),
        "metadata": found.location,
        "about": backend.spec.description if backend.spec else "",
        "hooks": ", ".join(backend.hooks),
        "tiers": _tiers(backend.spec.runners) if backend.spec else "",
    }
    rows |= reason_rows(backend.reasons)
    trace = Text(backend.failure.traceback.rstrip()) if backend.failure else Text()
    return Group(Text(f"\n{found.name}", style="bold"), fields(rows), *([trace] if trace else []))


def _tiers(runners: Sequence[RunnerSpec]) -> str:
    """By what runners rank where nothing was measured, the best first: `tuned: triton.standard, .contiguous`."""
    of_tier = ((tier, [runner for runner in runners if runner.tier == tier]) for tier in reversed(TIERS))
    return "\n".join(f"{tier}: {_names(found)}" for tier, found in of_tier if found)


def reason_rows(parts: Mapping[str, Sequence[Reason]]) -> dict[str, str]:
    """What is against each part of a plugin; what is against all of several parts is said once, above them."""
    first = next(iter(parts.values()), ())
    common = [reason for reason in first if len(parts) > 1 and all(reason in reasons for reasons in parts.values())]
    rows = {"all of these": _lines(common)} if common else {}
    for part, reasons in parts.items():
        own = [reason for reason in reasons if reason not in common]
        rows[part] = _lines(own) or ("nothing else" if common else "yes")
    return rows


def _lines(reasons: Sequence[Reason]) -> str:
    return "\n".join(map(str, reasons))


def _json(backends: list[Backend], environment: Environment, probed: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "hook_api": HOOK_API,
        "probed": probed,
        "environment": environment.to_json(),
        "backends": [_backend_json(backend) for backend in backends],
    }


def _backend_json(backend: Backend) -> dict[str, Any]:
    found, spec = backend.found, backend.spec
    return {
        "name": found.name,
        "status": backend.status,
        "problem": backend.problem,
        "distribution": found.distribution,
        "version": found.version,
        "entry_point": found.value,
        "location": found.location,
        "description": spec.description if spec else "",
        "hooks": list(backend.hooks),
        "dispatchers": [_part_json(backend, part) for part in (spec.dispatchers if spec else ())],
        "runners": [_part_json(backend, part) for part in (spec.runners if spec else ())],
        "error": str(backend.failure) if backend.failure else "",
        "traceback": backend.failure.traceback if backend.failure else "",
    }


def _part_json(backend: Backend, part: DispatcherSpec | RunnerSpec) -> dict[str, Any]:
    return {
        "name": part.short_name,
        "format": part.format,
        "devices": list(part.devices),
        "archs": list(part.archs),
        **({"tier": part.tier} if isinstance(part, RunnerSpec) else {}),
        "reasons": [attrs.asdict(reason) for reason in backend.reasons[part.short_name]],
    }
