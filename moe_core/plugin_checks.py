"""Whether a module may become a plugin, and whether what it declares fits the hooks it implements.

pluggy accepts much of this silently; here it is an error at registration, not a wrong call at load time.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pluggy

from moe_core import hookspecs
from moe_core.errors import PluginError, UnknownNameError
from moe_core.hookspecs import PROJECT
from moe_core.specs import HOOK_API, DispatcherSpec, PluginSpec, RunnerSpec

#: Every hook, in the order of the manual.
HOOKS = tuple(name for name, value in vars(hookspecs).items() if hasattr(value, f"{PROJECT}_spec"))
SELECT_HOOKS = ("select_dispatcher", "select_output_dtype")
#: What a plugin that declares runners must implement.
RUNNER_HOOKS = ("process_weights_after_loading", "fused_experts")

_VARIABLE_ARGUMENTS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def check_module(module: object) -> types.ModuleType:
    """Raise unless `module` is a module whose functions called like hooks are marked as such, and no others are.

    Raises:
        PluginError: No module, or what is called like a hook is unmarked, no plain function, or takes what the hook
            has not; or two functions are marked as one hook.
        UnknownNameError: A marked function that no hook is called like.
    """
    if not isinstance(module, types.ModuleType):
        advice = "the entry point names it: write 'package.module', without a colon"
        raise PluginError(f"a plugin is a module, got {type(module).__name__}; {advice}")
    for name in HOOKS:
        value = vars(module).get(name)
        if value is not None and not hasattr(value, f"{PROJECT}_impl") and not hasattr(value, f"{PROJECT}_spec"):
            raise PluginError(f"{name} is not marked with @hookimpl")
    functions: dict[str, object] = {}
    for name, value in list(vars(module).items()):
        marked = getattr(value, f"{PROJECT}_impl", None)
        hook = (marked.get("specname") or name) if isinstance(marked, dict) else None
        # A private name is a variable that holds a hook, as pluggy sees it too.
        if hook is None or hook.startswith("_"):
            continue
        if hook not in HOOKS:
            raise UnknownNameError("hook", hook, HOOKS)
        if functions.setdefault(hook, value) is not value:
            raise PluginError(f"hook {hook} is implemented by two functions, one of them called {name}; leave one")
        _check_function(hook, value)
    return module


def _check_function(hook: str, value: object) -> None:
    """Raise `PluginError` unless this is a function that returns, of arguments that the hook has."""
    # pluggy passes over what is marked and no function, as if it were not there.
    if not inspect.isroutine(value):
        raise PluginError(f"hook {hook}: expected a function, got {type(value).__name__}")
    function = inspect.unwrap(value)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError(f"hook {hook} is async; it is called, and must return its answer")
    known = [name for name in getattr(hookspecs, hook).__annotations__ if name != "return"]
    if strangers := [name for name in argument_names(function) if name not in known]:
        raise PluginError(f"hook {hook} takes {', '.join(strangers)}; it may take {', '.join(known) or 'no arguments'}")


def argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """What a Python function takes by position; read from its code, as annotations may be for type checkers alone."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]


def check_implementation(hook: str, implementation: pluggy.HookImpl) -> None:
    """Raise `PluginError` unless this can be called with the hook's arguments by name."""
    if implementation.wrapper or implementation.hookwrapper:
        raise PluginError(f"hook {hook}: wrappers are not supported; hooks are asked plugin by plugin")
    if inspect.isgeneratorfunction(inspect.unwrap(implementation.function)):
        raise PluginError(f"hook {hook} yields; it is called, and must return its answer")
    # Read from the code object: resolving a signature may evaluate annotations that only type checkers see.
    code = getattr(inspect.unwrap(implementation.function), "__code__", None)
    optional = bool(implementation.kwargnames) or (code is not None and code.co_kwonlyargcount > 0)
    if optional or (code is not None and code.co_flags & _VARIABLE_ARGUMENTS):
        raise PluginError(f"hook {hook}: arguments must be named, positional and without defaults")


def read_declaration(name: str, implementations: Mapping[str, Callable[..., Any]]) -> PluginSpec:
    """Ask a plugin for its declaration and check it.

    Args:
        name: The plugin's name.
        implementations: Hook name -> the plugin's implementation.

    Raises:
        PluginError: It is no `PluginSpec`, has another name or hook API, or has runners without the hooks for them.
    """
    declare = implementations.get("declare_backends")
    if declare is None:
        if any(hook in implementations for hook in SELECT_HOOKS):
            return PluginSpec(name=name, hook_api=HOOK_API, description="policy")
        raise PluginError("hook declare_backends is missing, and it implements no select hook either")
    spec = declare()
    if type(spec) is not PluginSpec:
        raise PluginError(f"declare_backends returned {type(spec).__name__}, expected PluginSpec")
    for parts, kind in ((spec.dispatchers, DispatcherSpec), (spec.runners, RunnerSpec)):
        # A subclass would be no value any more: its properties may fail, or change after all checks.
        if others := [type(part).__name__ for part in parts if type(part) is not kind]:
            raise PluginError(f"declare_backends returned {others[0]}, expected {kind.__name__}")
    if spec.hook_api != HOOK_API:
        newer = spec.hook_api > HOOK_API
        advice = "install a newer moe-core or an older plugin" if newer else "install a newer plugin"
        raise PluginError(f"it declares hook API {spec.hook_api}, this moe-core speaks {HOOK_API}; {advice}")
    if spec.name != name:
        raise PluginError(f"declare_backends says name {spec.name!r}, the entry point says {name!r}")
    missing = _missing(RUNNER_HOOKS, implementations) if spec.runners else []
    if missing:
        raise PluginError(f"it declares runners but does not implement {' and '.join(missing)}")
    return spec


def _missing(hooks: Iterable[str], implementations: Mapping[str, object]) -> list[str]:
    return [hook for hook in hooks if hook not in implementations]
