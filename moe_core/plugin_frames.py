"""Which plugin's function an error came from, read from its traceback: nothing is done before there is one."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from moe_core.discovery import Found
from moe_core.errors import PluginError, in_words, is_interrupt

#: How such a note begins.
_RAISED = "raised"


def note(error: BaseException, text: str) -> None:
    """Add a note, once: a plugin may raise one object again and again."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def name_origin(error: BaseException, plugins: Iterable[Found], combination: str) -> None:
    """Note in an error of a forward which plugin's function raised it, and what ran; its class and message stay.

    Whose function raises need not be at fault: a combine may be given rows that no runner should give.

    Args:
        error: Being handled.
        plugins: Those whose functions run there.
        combination: Full name of what ran, and what is known of it.

    Raises:
        PluginError: The error would end the process without a word, as `SystemExit` does; not for an interrupt.
    """
    if is_interrupt(error):
        return
    function = _function_of_a_plugin(error, plugins)
    where = f"in the forward of {combination}"
    if not isinstance(error, Exception):
        raise PluginError(f"{function + ', ' if function else ''}{where}: {in_words(error)}") from error
    note(error, f"{_RAISED} by {function}, {where}" if function else f"{_RAISED} {where}")


def origin_of(error: BaseException) -> str:
    """What `name_origin` noted, "" if it did not see this error."""
    notes = (text for text in getattr(error, "__notes__", ()) if text.startswith(f"{_RAISED} "))
    return next(notes, "")


def _function_of_a_plugin(error: BaseException, plugins: Iterable[Found]) -> str:
    """`plugin 'x' (...), function x.plugin.fused_experts.<locals>.experts`: the outermost that was running, or ""."""
    # A plugin is its package, or a module alone.
    folders = [(plugin, plugin.value.rpartition(".")[0] or plugin.value) for plugin in plugins]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        for plugin, folder in folders:
            if folder and f"{module}.".startswith(f"{folder}."):
                return f"plugin {plugin}, function {module}.{frame.f_code.co_qualname}"
    return ""
