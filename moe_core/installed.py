"""What is installed on this machine and what its process is told: packages, programs and environment variables.

Everything is looked up and nothing imported or started, so that a description of the machine has no side effect.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_core.requirement import Program


@functools.lru_cache(maxsize=1)
def _distributions_by_module(installed: tuple[tuple[str, int], ...]) -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _installation_state() -> tuple[tuple[str, int], ...]:
    """Changes when something is installed, so that no list outlives an installation."""
    folders = [folder for folder in sys.path if os.path.isdir(folder)]
    return tuple((folder, os.stat(folder).st_mtime_ns) for folder in folders)


def installed_version(module: str) -> str | None:
    """Version of an import name from metadata alone: "" if it has none, None if it is not installed.

    The module is looked for, never imported: an import may fail, print, or initialise a device.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:
        # Imported already, by something that gave it no spec.
        return "" if module in sys.modules else None
    if spec is None:
        return None
    for distribution in sorted(_distributions_by_module(_installation_state()).get(module, ())):
        return importlib.metadata.version(distribution)
    # A mere folder of that name on the path counts as a namespace package for Python, but not for us.
    return None if spec.origin is None else ""


def installed_packages(modules: Iterable[str]) -> dict[str, str]:
    """Import name -> version of those of `modules` that are installed."""
    versions = {module: installed_version(module) for module in modules}
    return {module: version for module, version in versions.items() if version is not None}


def variables_set(names: Iterable[str]) -> dict[str, str]:
    """Name -> value of those environment variables of this process that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def program_path(program: Program) -> str:
    """Where a program is on this machine, "" if it is in none of its places."""
    toolkit = next(filter(None, map(os.environ.get, program.folders)), "")
    if not toolkit and (found := shutil.which(program.name)):
        return found
    path = Path(toolkit or program.default, "bin", program.name)
    return str(path) if (toolkit or program.default) and path.is_file() else ""


def programs_found(programs: Iterable[Program]) -> dict[str, str]:
    """Name -> path of each program, "" if it is nowhere; looked for in several ways, one of them suffices."""
    found: dict[str, str] = {}
    for program in programs:
        found[program.name] = found.get(program.name) or program_path(program)
    return found
