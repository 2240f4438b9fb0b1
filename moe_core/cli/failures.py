"""What a command says of an error that is none of the project's: memory ran out, or a plugin failed in a forward."""

from __future__ import annotations

import traceback

from moe_core.errors import out_of_memory, told
from moe_core.manager import default_manager


def failure(error: BaseException) -> str:
    """The message for an error that ends a command; "" for a fault of this program, whose traceback is what is wanted.

    A hook that fails is told where it is called. What hooks return runs in every forward, where nothing stands around
    it; which plugin it is of, the traceback knows.
    """
    if short := out_of_memory(error):
        return f"{short}; take fewer tokens, a smaller or quantized model, or another device"
    function = _function_of_a_plugin(error)
    return f"{function}: {told(error)}\nthe traceback: -v" if function else ""


def _function_of_a_plugin(error: BaseException) -> str:
    """`plugin 'x' (...), function x.plugin.fused_experts.<locals>.experts`: the outermost that was running, if any."""
    if not default_manager.cache_info().currsize:
        return ""
    manager = default_manager()
    # A plugin is its package, or a module alone.
    folders = {name: manager.found(name).value for name in manager.names()}
    folders = {name: value.rpartition(".")[0] or value for name, value in folders.items()}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        for name, folder in folders.items():
            if f"{module}.".startswith(f"{folder}."):
                return f"plugin {manager.found(name)}, function {module}.{frame.f_code.co_qualname}"
    return ""
