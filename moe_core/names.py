"""The names in a request: one that means nothing is an error, not a preference that never applies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moe_core.declared import DeclaredDispatcher, DeclaredRunner, DeclaredSpec, answers_to
from moe_core.errors import UnknownBackendError
from moe_core.findings import PluginReport
from moe_core.request import LayerRequest


def check_names(declared: Sequence[DeclaredSpec], request: LayerRequest, reports: Sequence[PluginReport]) -> None:
    """Raise `UnknownBackendError` for a pin, prefer or exclude that names nothing declared or discovered."""
    a2a_pins = [request.a2a_backend, *(workload.a2a_backend for workload in request.workloads)]
    if not any((*a2a_pins, request.runner_backend, request.prefer, request.exclude)):
        return
    dispatchers = [d for d in declared if isinstance(d, DeclaredDispatcher)]
    runners = [d for d in declared if isinstance(d, DeclaredRunner)]
    runner_names = _plugins((d.spec.name, d.plugin) for d in runners)
    fused = [(d.spec.a2a, d.plugin) for d in runners if d.spec.a2a]
    a2a_names = _plugins([*((d.spec.name, d.plugin) for d in dispatchers), *fused])
    for pin in a2a_pins:
        if pin is not None and pin not in a2a_names and not any(answers_to(pin, d) for d in dispatchers):
            fits = _joins(dispatchers, runners, request.runner_backend)
            hint = f"{fits}{_failed_hint(reports)}".rstrip()
            raise UnknownBackendError("a2a backend", pin, a2a_names, hint, _spellings(dispatchers))
    if request.runner_backend is not None and not any(answers_to(request.runner_backend, d) for d in runners):
        hint = _failed_hint(reports)
        raise UnknownBackendError("runner backend", request.runner_backend, runner_names, hint, _spellings(runners))
    # A name of a plugin means all that it has.
    plugins: dict[str, list[str]] = {name: [] for name in (*(d.plugin for d in declared), *(r.name for r in reports))}
    everything = _plugins([*fused, *((d.spec.name, d.plugin) for d in declared)]) | plugins
    for name in (*request.prefer, *request.exclude):
        if name not in everything and not any(answers_to(name, d) for d in declared):
            raise UnknownBackendError("backend", name, everything, _failed_hint(reports), _spellings(declared))


def _plugins(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Name -> the plugins that have it, from pairs of the two."""
    found: dict[str, list[str]] = {}
    for name, plugin in names:
        found.setdefault(name, []).append(plugin)
    return found


def _spellings(declared: Iterable[DeclaredSpec]) -> set[str]:
    """Every name that `answers_to` takes."""
    return {
        name for d in declared for short in (d.spec.name, d.spec.short_name) for name in (short, f"{d.plugin}:{short}")
    }


def _joins(dispatchers: list[DeclaredDispatcher], runners: list[DeclaredRunner], pin: str | None) -> str:
    formats = {runner.spec.format for runner in runners if pin is not None and answers_to(pin, runner)}
    fitting = sorted({d.spec.short_name for d in dispatchers if d.spec.format in formats})
    return f"Runner {pin!r} can be joined to: {', '.join(fitting) or 'nothing'}. " if pin is not None else ""


def _failed_hint(reports: Sequence[PluginReport]) -> str:
    failed = [f"{report.name} ({report.error.splitlines()[-1]})" for report in reports if report.error]
    return f"Plugins that failed to load: {'; '.join(failed)}." if failed else ""
