"""What each plugin is on a machine: ready, unavailable, failed, or in conflict; collected for `list-backends`."""

from __future__ import annotations

import os

import attrs

from moe_core.discovery import Failed, Found
from moe_core.environment import Environment
from moe_core.feasibility import machine_reasons
from moe_core.findings import Reason
from moe_core.manager import ALLOW_LIST_VARIABLE, BackendManager
from moe_core.specs import DispatcherSpec, PluginSpec, RunnerSpec

_WITHOUT_DEVICE = ("package", "version", "program", "variable")
# What cannot be changed by installing something is said first.
_ORDER = ("device", "arch", *_WITHOUT_DEVICE)


@attrs.frozen(kw_only=True)
class Backend:
    """One row: a plugin that is ready, unavailable on this machine, failed, or in conflict with another.

    Attributes:
        found: Where it came from.
        status: The first word of the table's last column.
        problem: What follows it, "" for nothing.
        spec: Its declaration, None if it failed.
        hooks: The hooks it implements.
        reasons: Short name of each dispatcher and runner -> what is against it on this machine.
        failure: What stopped it.
    """

    found: Found
    status: str
    problem: str = ""
    spec: PluginSpec | None = None
    hooks: tuple[str, ...] = ()
    reasons: dict[str, tuple[Reason, ...]] = attrs.field(factory=dict)
    failure: Failed | None = None

    @property
    def summary(self) -> str:
        """Status and problem in one line."""
        separator = " " if self.status == "ready" else ": "
        return f"{self.status}{separator}{self.problem}" if self.problem else self.status


def parts_of(spec: PluginSpec) -> tuple[DispatcherSpec | RunnerSpec, ...]:
    """All specs of a plugin, dispatchers first."""
    return (*spec.dispatchers, *spec.runners)


def backends_on(manager: BackendManager, environment: Environment, *, probed: bool) -> list[Backend]:
    """Every plugin that was found, sorted by name and distribution.

    Args:
        manager: The plugins.
        environment: The machine.
        probed: Whether its device is known; if not, packages, programs and variables alone are judged.
    """
    backends = [_ready(manager, name, environment, probed) for name in manager.names()]
    backends += [_failed(failure) for failure in manager.failures()]
    return sorted(backends, key=lambda backend: (backend.found.name, backend.found.distribution))


def why_none() -> str:
    """What to say where there is no backend at all."""
    if ALLOW_LIST_VARIABLE in os.environ:
        return f"no backend: environment variable {ALLOW_LIST_VARIABLE} allows none"
    return "no backend is installed; those of a source tree are once it is: pip install ."


def allowed_plugins() -> str:
    """`only torch, triton (by variable MOE_CORE_PLUGINS)`; "" where every plugin is loaded that is installed."""
    allowed = os.environ.get(ALLOW_LIST_VARIABLE)
    if allowed is None:
        return ""
    names = ", ".join(filter(None, map(str.strip, allowed.split(","))))
    return f"only {names or 'none'} (by variable {ALLOW_LIST_VARIABLE})"


def _ready(manager: BackendManager, name: str, environment: Environment, probed: bool) -> Backend:
    spec = manager.require(name)
    reasons = {
        part.short_name: tuple(
            reason
            for reason in machine_reasons(part, spec.requirements, environment)
            if probed or reason.code in _WITHOUT_DEVICE
        )
        for part in parts_of(spec)
    }
    blocked = [part for part, found in reasons.items() if found]
    status = "unavailable" if reasons and len(blocked) == len(reasons) else "ready"
    problem = _first_reason(reasons) if status == "unavailable" else _without(spec, blocked)
    return Backend(
        found=manager.found(name),
        status=status,
        problem=problem,
        spec=spec,
        hooks=manager.hooks(name),
        reasons=reasons,
    )


def _failed(failure: Failed) -> Backend:
    status = "conflict" if failure.stage == "conflict" else "failed"
    return Backend(found=failure.found, status=status, problem=str(failure), failure=failure)


def _first_reason(reasons: dict[str, tuple[Reason, ...]]) -> str:
    """The reason that stands in the way of most, in a few words; missing packages are named together."""
    found = sorted({r for rs in reasons.values() for r in rs}, key=lambda r: (_ORDER.index(r.code), r.needs))
    # A reason against one part alone is not why the whole plugin is unavailable.
    common = [r for r in found if all(r.code in {other.code for other in rs} for rs in reasons.values())] or found
    code = common[0].code
    if code == "package":
        return f"{', '.join(r.needs for r in common if r.code == code)} not installed"
    return f"{code}: needs {common[0].needs}, found {common[0].found}"


def _without(spec: PluginSpec, blocked: list[str]) -> str:
    """Names that cannot be used here at all; where only some of a name's variants cannot, their number."""
    parts = parts_of(spec)
    usable = {part.name for part in parts if part.short_name not in blocked}
    missing = [name for name in dict.fromkeys(part.name for part in parts) if name not in usable]
    if missing:
        return f"but not {', '.join(missing)}"
    return f"({len(blocked)} of {len(parts)} variants need another machine: list-backends -v)" if blocked else ""
