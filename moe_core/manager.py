"""The plugins of one process: registered one by one, each in its own `try`, and asked one by one.

Only this module touches pluggy's hook callers. Failures are remembered as data and raised when the plugin is
asked for by name; successes only are cached.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from moe_core import hookspecs
from moe_core.decision import PluginReport
from moe_core.discovery import Failed, Found, Loaded, find, load
from moe_core.errors import MoeCoreError, PluginConflictError, PluginError, UnknownNameError
from moe_core.hookspecs import PROJECT
from moe_core.request import LayerRequest
from moe_core.specs import HOOK_API, Candidate, DispatcherSpec, PluginSpec, RunnerSpec, TokenDtype

if TYPE_CHECKING:
    from moe_core.payloads import ExpertsFn, FusedFn, PreparedWeights, RawWeights
    from moe_core.plan import MoEPlan, Route

#: Names of plugins to load, separated by commas; unset means all, empty means none.
ALLOW_LIST_VARIABLE = "MOE_CORE_PLUGINS"

_HOOKS = tuple(name for name, value in vars(hookspecs).items() if hasattr(value, f"{PROJECT}_spec"))
_SELECT_HOOKS = ("select_dispatcher", "select_output_dtype")


class BackendManager:
    """Registered plugins and the typed way to ask each of them."""

    def __init__(self) -> None:
        """Start without plugins; see `default_manager` for the installed ones."""
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._found: dict[str, Found] = {}
        self._specs: dict[str, PluginSpec] = {}
        self._failed: dict[str, list[Failed]] = {}

    # Registration -------------------------------------------------------------------------------------------

    def load(self, found: Iterable[Found]) -> None:
        """Load, register and ask for declarations, each plugin by itself; failures become rows, not exceptions.

        Two distributions that claim one name are both refused: neither silently wins.
        """
        plugins = sorted(found, key=lambda f: (f.name, f.distribution, f.value))
        claims = Counter(plugin.name for plugin in plugins)
        for plugin in plugins:
            rivals = [other for other in plugins if other.name == plugin.name]
            if claims[plugin.name] > 1:
                error = PluginConflictError(
                    f"plugin name {plugin.name!r} is claimed by {' and '.join(map(str, rivals))}"
                )
                self._remember(Failed.because(plugin, "conflict", error))
                continue
            result = load(plugin)
            if isinstance(result, Failed):
                self._remember(result)
                continue
            self._try_register(result)

    def _try_register(self, loaded: Loaded) -> None:
        try:
            self.register(loaded.found.name, loaded.module, loaded.found)
        except PluginError as error:
            self._remember(Failed.because(loaded.found, "register", error.__cause__ or error))

    def register(self, name: str, module: object, found: Found | None = None) -> None:
        """Register one plugin and ask it for its declaration.

        Args:
            name: The plugin's name.
            module: The plugin module.
            found: Where it came from, if discovery found it.

        Raises:
            PluginConflictError: The name is taken, or the module is registered under another name.
            PluginError: No module, unknown hooks or arguments, another hook API, or a failing declaration. The
                plugin is then not registered at all.
        """
        origin = found or Found(name=name, load=lambda: module, value=getattr(module, "__name__", repr(module)))
        if self._pluggy.get_plugin(name) is module:
            return
        if name in self._found:
            raise PluginConflictError(
                f"plugin name {name!r} is taken by {self._found[name]}; refused: {origin}. Rename one, or uninstall it"
            )
        known_as = self._pluggy.get_name(module)
        if known_as is not None:
            raise PluginConflictError(f"plugin {origin} is already registered as {known_as!r}; one module has one name")
        try:
            self._check_hooks(module)
            self._pluggy.register(module, name)
            self._pluggy.check_pending()
            self._specs[name] = self._declare(name)
        except (Exception, SystemExit) as error:
            # pluggy 1.6 leaves a plugin half registered when its validation fails.
            if self._pluggy.get_plugin(name) is not None:
                self._pluggy.unregister(name=name)
            raise PluginError(f"plugin {origin} was refused: {type(error).__name__}: {error}") from error
        self._found[name] = origin
        self._failed.pop(name, None)

    def unregister(self, name: str) -> None:
        """Forget a registered plugin; its name is free again."""
        self.require(name)
        self._pluggy.unregister(name=name)
        del self._found[name], self._specs[name]

    def _check_hooks(self, module: object) -> None:
        """What pluggy accepts silently: plugins that are no modules, unmarked hooks, arguments with defaults."""
        if not isinstance(module, types.ModuleType):
            raise PluginError(f"a plugin is a module, got {type(module).__name__}")
        for name in _HOOKS:
            function = vars(module).get(name)
            if function is None or inspect.getmodule(function) is hookspecs:
                continue
            if not hasattr(function, f"{PROJECT}_impl"):
                raise PluginError(f"function {name} is not marked with @hookimpl")
            # Read from the code object: resolving a signature may evaluate annotations that only type checkers see.
            if function.__defaults__ or function.__code__.co_kwonlyargcount:
                raise PluginError(f"hook {name}: arguments must be positional and have no defaults")

    def _declare(self, name: str) -> PluginSpec:
        implementation = self._implementation(name, "declare_backends")
        if implementation is None:
            if any(self._implementation(name, hook) for hook in _SELECT_HOOKS):
                return PluginSpec(name=name, hook_api=HOOK_API, description="policy")
            raise PluginError("hook declare_backends is missing, and it implements no select hook either")
        spec = implementation()
        if not isinstance(spec, PluginSpec):
            raise PluginError(f"declare_backends returned {type(spec).__name__}, expected PluginSpec")
        if spec.name != name:
            raise PluginError(f"declare_backends says name {spec.name!r}, the entry point says {name!r}")
        if spec.hook_api != HOOK_API:
            newer = spec.hook_api > HOOK_API
            advice = "install a newer moe-core or an older plugin" if newer else "install a newer plugin"
            raise PluginError(f"it declares hook API {spec.hook_api}, this moe-core speaks {HOOK_API}; {advice}")
        return spec

    def _remember(self, failed: Failed) -> None:
        self._failed.setdefault(failed.found.name, []).append(failed)

    # Reading ------------------------------------------------------------------------------------------------

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
        modules: set[str] = set()
        for plugin in self.specs():
            specs = (*plugin.dispatchers, *plugin.runners)
            modules.update(requirement.module for requirement in plugin.requirements)
            modules.update(requirement.module for spec in specs for requirement in spec.requirements)
        return tuple(sorted(modules))

    def hooks(self, name: str) -> tuple[str, ...]:
        """Names of the hooks that a ready plugin implements."""
        return tuple(hook for hook in _HOOKS if self._implementation(name, hook))

    def found(self, name: str) -> Found:
        """Where a ready plugin came from."""
        self.require(name)
        return self._found[name]

    def reports(self) -> tuple[PluginReport, ...]:
        """One row per plugin, failed ones included, sorted by name."""
        rows = [
            PluginReport(name=name, status="ready", distribution=found.distribution, version=found.version)
            for name, found in self._found.items()
        ]
        for failed in self.failures():
            status = "conflict" if failed.stage == "conflict" else "failed"
            found = failed.found
            rows.append(
                PluginReport(
                    name=found.name,
                    status=status,
                    distribution=found.distribution,
                    version=found.version,
                    error=str(failed),
                )
            )
        return tuple(sorted(rows, key=lambda row: (row.name, row.distribution)))

    def require(self, name: str) -> PluginSpec:
        """The declaration of a plugin; raises what stopped it if it failed.

        Raises:
            PluginError: It failed to load; the original error is the cause.
            UnknownNameError: No such plugin is installed.
        """
        if name in self._specs:
            return self._specs[name]
        for failed in self._failed.get(name, ()):
            raise PluginError(f"plugin {failed.found} failed to {failed.stage}: {failed}") from failed.error
        raise UnknownNameError("plugin", name, (*self._specs, *self._failed))

    # Asking -------------------------------------------------------------------------------------------------

    def select_dispatcher(
        self, request: LayerRequest, candidates: Sequence[Candidate], policy_only: bool
    ) -> tuple[Candidate, str]:
        """The chosen candidate and who chose it (`rank` if nobody did); see the hook's documentation."""
        for name in self._asked(candidates[0], policy_only):
            answer = self._ask(name, "select_dispatcher", request=request, candidates=tuple(candidates))
            if answer is None:
                continue
            if answer not in candidates:
                listed = ", ".join(candidate.full_name for candidate in candidates)
                raise PluginError(
                    f"plugin {name!r}, hook select_dispatcher: {answer!r} is no candidate; they are: {listed}"
                )
            return answer, name
        return candidates[0], "rank"

    def select_output_dtype(
        self,
        request: LayerRequest,
        candidate: Candidate,
        token_dtypes: Sequence[TokenDtype],
        policy_only: bool,
    ) -> tuple[TokenDtype, str] | None:
        """The chosen dtype and who chose it, or None if nobody did; see the hook's documentation."""
        dispatcher: DispatcherSpec | None = candidate.dispatcher.spec if candidate.dispatcher else None
        runner: RunnerSpec = candidate.runner.spec
        for name in self._asked(candidate, policy_only):
            answer = self._ask(
                name,
                "select_output_dtype",
                request=request,
                dispatcher=dispatcher,
                runner=runner,
                candidates=tuple(token_dtypes),
            )
            if answer is None:
                continue
            if answer not in token_dtypes:
                listed = ", ".join(map(str, token_dtypes))
                raise PluginError(
                    f"plugin {name!r}, hook select_output_dtype: {answer!r} is no candidate; they are: {listed}"
                )
            return answer, name
        return None

    def process_weights(self, plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
        """The runner's plugin's prepared weights; checks their type and tag."""
        from moe_core.payloads import PreparedWeights

        name = plan.runner_plugin
        prepared = self._ask(name, "process_weights_after_loading", required=True, plan=plan, weights=weights, out=out)
        if not isinstance(prepared, PreparedWeights):
            raise PluginError(
                f"plugin {name!r}, hook process_weights_after_loading: expected PreparedWeights, "
                f"got {type(prepared).__name__}"
            )
        if prepared.layout != plan.weight_layout or (out is not None and prepared is not out):
            raise PluginError(
                f"plugin {name!r}, hook process_weights_after_loading: expected layout {plan.weight_layout!r}"
                f"{' in the tensors given as out' if out is not None else ''}, got {prepared.layout!r}"
            )
        return prepared

    def bind_experts(self, plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn | FusedFn:
        """The route's experts function from its runner's plugin."""
        name = route.runner.plugin
        if weights.layout != route.runner.spec.weight_layout:
            raise PluginError(
                f"runner {route.runner.full_name} reads weight layout {route.runner.spec.weight_layout!r}, "
                f"these weights are {weights.layout!r}; prepare them from the raw weights"
            )
        experts = self._ask(name, "fused_experts", required=True, plan=plan, route=route, weights=weights)
        if not callable(experts):
            raise PluginError(f"plugin {name!r}, hook fused_experts: expected a function, got {type(experts).__name__}")
        return experts  # type: ignore[no-any-return]

    def _asked(self, candidate: Candidate, policy_only: bool) -> list[str]:
        policies = [name for name, spec in sorted(self._specs.items()) if not (spec.dispatchers or spec.runners)]
        return policies if policy_only else [*policies, candidate.runner.plugin]

    def _implementation(self, plugin: str, hook: str) -> Callable[..., Any] | None:
        """One plugin's implementation of one hook, taking the hook's arguments by name."""
        for found in getattr(self._pluggy.hook, hook).get_hookimpls():
            if found.plugin_name == plugin:
                return functools.partial(_call, found)
        return None

    def _ask(self, plugin: str, hook: str, *, required: bool = False, **arguments: Any) -> Any:
        self.require(plugin)
        implementation = self._implementation(plugin, hook)
        if implementation is None:
            if required:
                raise PluginError(f"plugin {plugin!r} declares runners but does not implement hook {hook}")
            return None
        try:
            return implementation(**arguments)
        except MoeCoreError:
            raise
        except Exception as error:
            raise PluginError(f"plugin {self._found[plugin]}, hook {hook}: {type(error).__name__}: {error}") from error


def _call(implementation: pluggy.HookImpl, **arguments: Any) -> Any:
    return implementation.function(*(arguments[name] for name in implementation.argnames))


@functools.cache
def default_manager() -> BackendManager:
    """The installed plugins, loaded once per process; `default_manager.cache_clear()` looks again.

    Raises:
        UnknownNameError: The allow-list variable names a plugin that is not installed.
    """
    allowed = os.environ.get(ALLOW_LIST_VARIABLE)
    names = None if allowed is None else [name.strip() for name in allowed.split(",") if name.strip()]
    manager = BackendManager()
    manager.load(find(names))
    return manager
