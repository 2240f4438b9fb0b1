"""The library whose kernels a plugin calls: imported when a route is bound, and its functions looked at before.

A plugin lists and explains itself without its library. What then loads it says why it cannot, and what to do: builds of
C++ and CUDA fit one release of torch, and their functions differ between releases.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
from collections.abc import Callable
from types import ModuleType
from typing import Any

from moe_core.errors import PluginError, is_interrupt
from moe_core.installed import installed_version
from moe_core.requirement import Requirement


def import_library(requirement: Requirement) -> ModuleType:
    """The module that a requirement names; what it prints while it is imported is dropped.

    Raises:
        PluginError: It cannot be imported, whatever it raises; ends with the requirement's `install`.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module(requirement.module)
    except BaseException as error:
        # A library that exits or panics cannot be imported either; whoever interrupts it wants the program to end.
        if is_interrupt(error):
            raise
        raise PluginError(
            f"{_described(requirement)} cannot be imported beside torch {installed_version('torch')}: "
            f"{type(error).__name__}: {error}; {requirement.install}"
        ) from error


def require_keywords(function: Callable[..., Any], *names: str, of: Requirement) -> Callable[..., Any]:
    """`function`, if it takes these keywords and demands no others, or does not tell what it takes.

    Positions differ between releases, so that everything is passed by keyword; one that a release does not have would
    change what is computed.

    Args:
        function: One of the library.
        *names: What every call passes.
        of: The library.

    Raises:
        PluginError: The installed release has another signature.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Compiled: the first call tells.
        return function
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise PluginError(
            f"{_described(of)}: {function.__qualname__}: {error}; this plugin was written for another release: "
            f"{of.install}"
        ) from error
    return function


def _described(requirement: Requirement) -> str:
    return f"{requirement.module} {installed_version(requirement.module) or 'of unknown version'}"
