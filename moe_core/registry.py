"""The plugins of one process: each loaded, registered and asked for its declaration in its own `try`.

Failures are remembered as data and raised when the plugin is asked for by name.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import pluggy

from moe_core import hookspecs
from moe_core.discovery import Failed, Found, being_loaded, load, watched
from moe_core.environment import Environment
from moe_core.errors import PluginConflictError, PluginError, UnknownBackendError, in_words, is_interrupt
from moe_core.findings import PluginReport
from moe_core.hookspecs import ENTRY_POINT_GROUP, PROJECT
from moe_core.plugin_checks import HOOKS, check_implementation, check_module, read_declaration
from moe_core.probing import probe_environment
from moe_core.requirement import Program
from moe_core.specs import DeviceGeneration, DispatcherSpec, PluginSpec, RunnerSpec
from moe_core.vocabulary import DEVICE_TYPES


class PluginRegistry:
    """Registered plugins, what they declare, and what became of those that are not usable."""

    def __init__(self) -> None:
        """Start without plugins."""
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._found: dict[str, Found] = {}
        self._specs: dict[str, PluginSpec] = {}
        self._implementations: dict[str, dict[str, Callable[..., Any]]] = {}
        self._failed: dict[str, list[Failed]] = {}

    def load(self, found: Iterable[Found]) -> None:
        """Load, register and ask for declarations, each plugin by itself; failures become rows, not exceptions.

        Two distributions that claim one name are both refused: neither silently wins.
        """
        plugins = sorted(found, key=lambda f: (f.name, f.distribution, f.value))
        claims = Counter(plugin.name for plugin in plugins)
        for name in claims:
            self._failed.pop(name, None)
        for plugin in plugins:
            try:
                if claims[plugin.name] > 1:
                    raise _conflict(plugin.name, plugins)
                with being_loaded(plugin):
                    self._load(plugin)
            except PluginConflictError as error:
                self._remember(Failed.because(plugin, "conflict", error))
            except PluginError as error:
                self._remember(Failed.because(plugin, "register", error.__cause__ or error))

    def _load(self, plugin: Found) -> None:
        loaded = load(plugin)
        if isinstance(loaded, Failed):
            self._remember(loaded)
        else:
            self.register(plugin.name, loaded.module, plugin)

    def register(self, name: str, module: object, found: Found | None = None) -> None:
        """Register one plugin and ask it for its declaration; the same module under the same name is no change.

        Args:
            name: The plugin's name.
            module: The plugin module.
            found: Where it came from, if discovery found it.

        Raises:
            PluginConflictError: The name is taken, or the module is registered under another name.
            PluginError: No name, no module, unknown, missing or ill-formed hooks, another hook API, or a failing
                declaration. The plugin is then not registered at all.
        """
        if not (name and isinstance(name, str)):
            # pluggy makes up a name of its own, under which nobody would find the plugin again.
            raise PluginError(f"a plugin's name is a text that is not empty, got {name!r}")
        origin = found or Found(name=name, load=lambda: module, value=getattr(module, "__name__", repr(module)))
        if name in self._found:
            if self._pluggy.get_plugin(name) is module:
                return
            raise PluginConflictError(
                f"plugin name {name!r} is taken by {self._found[name]}; refused: {origin}. Rename one, or uninstall it"
            )
        known_as = next((other for other in self._found if self._pluggy.get_plugin(other) is module), None)
        if known_as is not None:
            raise PluginConflictError(f"plugin {origin} is already registered as {known_as!r}; one module has one name")
        try:
            implementations = self._register_hooks(name, module)
            with watched(origin, "reading the declaration of"):
                spec = read_declaration(name, implementations)
        except BaseException as error:
            # The user's interrupt passes, and leaves nothing behind; what else a plugin raises, exits included, is why
            # it is refused. pluggy 1.6 keeps a plugin whose validation failed.
            if self._pluggy.get_plugin(name) is not None:
                self._pluggy.unregister(name=name)
            if is_interrupt(error):
                raise
            raise PluginError(f"plugin {origin} was refused: {in_words(error)}") from error
        self._found[name], self._specs[name], self._implementations[name] = origin, spec, implementations
        self._failed.pop(name, None)

    def _register_hooks(self, name: str, module: object) -> dict[str, Callable[..., Any]]:
        self._pluggy.register(check_module(module), name)
        self._pluggy.check_pending()
        implementations: dict[str, Callable[..., Any]] = {}
        for hook in HOOKS:
            for implementation in getattr(self._pluggy.hook, hook).get_hookimpls():
                if implementation.plugin_name == name:
                    check_implementation(hook, implementation)
                    implementations[hook] = functools.partial(_call, implementation)
        return implementations

    def unregister(self, name: str) -> None:
        """Forget a registered plugin; its name is free again."""
        self.require(name)
        self._pluggy.unregister(name=name)
        del self._found[name], self._specs[name], self._implementations[name]

    def _remember(self, failed: Failed) -> None:
        self._failed.setdefault(failed.found.name, []).append(failed)

    def names(self) -> tuple[str, ...]:
        """Names of the plugins that are ready, sorted."""
        return tuple(sorted(self._specs))

    def specs(self) -> tuple[PluginSpec, ...]:
        """Declarations of the plugins that are ready, sorted by name."""
        return tuple(self._specs[name] for name in self.names())

    def failures(self) -> tuple[Failed, ...]:
        """Plugins that are not usable, sorted by name."""
        return tuple(failed for name in sorted(self._failed) for failed in self._failed[name])

    def modules_required(self) -> tuple[str, ...]:
        """Import names that any ready plugin requires: what an environment must know the versions of."""
        return tuple(sorted({requirement.module for part in self._parts() for requirement in part.requirements}))

    def variables_read(self) -> tuple[str, ...]:
        """Environment variables that the libraries of any ready plugin read: what an environment must know."""
        unless = {name for program in self.programs_started() for name in program.unless}
        return tuple(sorted(unless | {name for part in self._parts() for name in part.variables}))

    def programs_started(self) -> tuple[Program, ...]:
        """Programs that the libraries of any ready plugin start: what an environment must have looked for."""
        programs = (p for part in self._parts() for requirement in part.requirements for p in requirement.programs)
        return tuple(sorted(set(programs), key=attrs.astuple))

    def _parts(self) -> Iterator[PluginSpec | DispatcherSpec | RunnerSpec]:
        for plugin in self.specs():
            yield plugin
            yield from plugin.dispatchers
            yield from plugin.runners

    def device_types(self) -> tuple[str, ...]:
        """Device types that the core or any ready plugin knows."""
        return (*DEVICE_TYPES, *sorted({device for plugin in self.specs() for device in plugin.device_types}))

    def generations(self) -> tuple[DeviceGeneration, ...]:
        """What the ready plugins know about names of devices."""
        return tuple(generation for plugin in self.specs() for generation in plugin.generations)

    def probe(self, device_type: str | None = None) -> Environment:
        """This machine as far as the ready plugins care; argument and errors as `probe_environment`."""
        return probe_environment(
            self.modules_required(), device_type, self.generations(), self.variables_read(), self.programs_started()
        )

    def hooks(self, name: str) -> tuple[str, ...]:
        """Names of the hooks that a ready plugin implements."""
        self.require(name)
        return tuple(self._implementations[name])

    def found(self, name: str) -> Found:
        """Where a ready plugin came from."""
        self.require(name)
        return self._found[name]

    def reports(self) -> tuple[PluginReport, ...]:
        """One row per plugin, failed ones included, sorted by name."""
        ready = [_report(found, "ready") for found in self._found.values()]
        failed = [
            _report(failed.found, "conflict" if failed.stage == "conflict" else "failed", str(failed))
            for failed in self.failures()
        ]
        return tuple(sorted([*ready, *failed], key=lambda row: (row.name, row.distribution, row.status)))

    def versions(self) -> dict[str, str]:
        """Name of each ready plugin -> its distribution and version, which tell whether times of it still hold."""
        return {name: f"{found.distribution} {found.version}".strip() for name, found in self._found.items()}

    def require(self, name: str) -> PluginSpec:
        """The declaration of a plugin; raises what stopped it if it failed.

        Raises:
            PluginError: It failed to load; the original error is the cause.
            UnknownBackendError: No such plugin is installed.
        """
        if name in self._specs:
            return self._specs[name]
        for failed in self._failed.get(name, ()):
            raise PluginError(f"plugin {failed.found} is not usable ({failed.stage}): {failed}") from failed.error
        hint = f"A plugin is an entry point of group {ENTRY_POINT_GROUP!r} of an installed distribution."
        raise UnknownBackendError("plugin", name, dict.fromkeys((*self._specs, *self._failed), ()), hint)


def _conflict(name: str, plugins: Iterable[Found]) -> PluginConflictError:
    rivals = " and ".join(str(plugin) for plugin in plugins if plugin.name == name)
    return PluginConflictError(f"plugin name {name!r} is claimed by {rivals}; none is used. Uninstall all but one")


def _report(found: Found, status: str, error: str = "") -> PluginReport:
    return PluginReport(
        name=found.name, status=status, distribution=found.distribution, version=found.version, error=error
    )


def _call(implementation: pluggy.HookImpl, **arguments: Any) -> Any:
    return implementation.function(*(arguments[name] for name in implementation.argnames))
