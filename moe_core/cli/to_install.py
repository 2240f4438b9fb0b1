"""What `moe-core doctor` says to install: per plugin, and apart where it would not help on this machine."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from moe_core.cli.backend_status import Backend, parts_of
from moe_core.environment import Environment
from moe_core.specs import Requirement

#: Reasons against a part that nothing installed removes.
_OF_DEVICE = ("device", "arch")
HERE, ELSEWHERE = "to install", "to install, for other devices"


def to_install(backends: Iterable[Backend], environment: Environment) -> dict[str, dict[str, str]]:
    """`HERE` and `ELSEWHERE` -> plugin -> what to type, a line for each build; plugins that lack nothing are not there.

    Args:
        backends: The plugins; those that failed say nothing.
        environment: The machine.
    """
    found: dict[str, dict[str, str]] = {HERE: {}, ELSEWHERE: {}}
    for backend in backends:
        if backend.spec is None:
            continue
        parts = parts_of(backend.spec)
        usable = [part for part in parts if not _is_for_other_devices(backend, part.short_name)]
        needed = [r for part in (backend.spec, *(usable or parts)) for r in part.requirements]
        if hints := install_hints(needed, environment):
            found[HERE if usable or not parts else ELSEWHERE][backend.found.name] = "\n".join(hints)
    return found


def install_hints(requirements: Iterable[Requirement], environment: Environment) -> list[str]:
    """What to type for those that are not met, once for several lower bounds of one build: for the highest."""
    highest: dict[tuple[str, str], Requirement] = {}
    for requirement in requirements:
        version = environment.version(requirement.module)
        if requirement.install and (version is None or not requirement.is_met_by(version)):
            minimum = requirement.minimum
            build = requirement.module, requirement.install.replace(minimum, "") if minimum else requirement.install
            other = highest.get(build)
            if other is None or Version(other.minimum or "0") < Version(minimum or "0"):
                highest[build] = requirement
    return list(dict.fromkeys(requirement.install for requirement in highest.values()))


def _is_for_other_devices(backend: Backend, part: str) -> bool:
    return any(reason.code in _OF_DEVICE for reason in backend.reasons.get(part, ()))
