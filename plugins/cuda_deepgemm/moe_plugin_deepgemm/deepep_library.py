"""DeepEP itself: where it comes from, and a look at its functions before anything depends on them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from moe_core.environment import installed_version
from moe_core.errors import PluginError


def library() -> Any:
    """`deep_ep`, imported.

    Raises:
        PluginError: It cannot be imported, for whichever reason: libraries of C++ and CUDA have many.
    """
    try:
        return importlib.import_module("deep_ep")
    except Exception as error:
        raise PluginError(
            f"deep_ep {installed_version('deep_ep') or ''} cannot be imported: {type(error).__name__}: {error}; "
            f"install a build for torch {torch.__version__} and its CUDA libraries"
        ) from error


def checked(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """`function`, if it takes these keywords and demands no others.

    Positions differ between releases, so that everything is passed by keyword; one that a release does not have would
    change what is sent.

    Raises:
        PluginError: The installed release has another signature.
    """
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise PluginError(
            f"deep_ep {installed_version('deep_ep') or ''}: Buffer.{function.__name__}: {error}; DeepEP 1.2.1 has what "
            "is needed here"
        ) from error
    return function
