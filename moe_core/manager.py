"""The typed way to ask each plugin: one facade method per hook, one plugin at a time, every answer checked."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from moe_core.declared import Candidate
from moe_core.discovery import find
from moe_core.errors import MoeCoreError, PluginError, in_words, is_interrupt
from moe_core.plugin_frames import note
from moe_core.registry import PluginRegistry
from moe_core.request import LayerRequest
from moe_core.specs import DispatcherSpec, RunnerSpec, TokenDtype

if TYPE_CHECKING:
    from moe_core.payloads import ExpertGroup, ExpertsFn, FusedFn, PreparedWeights, RawWeights
    from moe_core.plan import MoEPlan, Route

#: Names of plugins to load, separated by commas; unset means all, empty means none.
ALLOW_LIST_VARIABLE = "MOE_CORE_PLUGINS"


class BackendManager(PluginRegistry):
    """Registered plugins and the hooks of each; see `default_manager` for the installed ones."""

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
                given = answer.full_name if isinstance(answer, Candidate) else repr(answer)
                self._refuse(name, "select_dispatcher", f"{given} is no candidate; they are: {listed}")
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
                given = str(answer) if isinstance(answer, TokenDtype) else repr(answer)
                self._refuse(name, "select_output_dtype", f"{given} is no candidate; they are: {listed}")
            return answer, name
        return None

    def process_weights(self, plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
        """The runner's plugin's prepared weights; checks their type and tag, and that a reload moves no tensor.

        Raises:
            PluginError: `out` is in another layout than the plan's, before anything is written to it; or the plugin
                fails, or does not answer as it should: `out` may then be partly overwritten, and a note says so.
        """
        # Its own mapping: what a plugin does to it stays with the plugin.
        own = attrs.evolve(weights, tensors=dict(weights.tensors))
        if out is None:
            return self._prepared(plan, own, None)
        if out.layout != plan.weight_layout:
            raise PluginError(
                f"a plan for weight layout {plan.weight_layout!r} cannot refill weights in {out.layout!r}; nothing was "
                "written: prepare new ones"
            )
        return self._refilled(plan, own, out)

    def _refilled(self, plan: MoEPlan, weights: RawWeights, out: PreparedWeights) -> PreparedWeights:
        from moe_core.refill import PARTLY_WRITTEN, Kept

        kept = Kept.of(out)
        try:
            self._prepared(plan, weights, out)
            if changes := kept.changes(out):
                problem = f"a reload changes nothing of out but the values of its tensors; {', '.join(changes)}"
                self._refuse(plan.runner_plugin, "process_weights_after_loading", problem)
        except BaseException as error:
            # It passes on, whatever it is: an interrupt, too, leaves weights that are neither the old nor the new ones.
            kept.restore(out)
            error.add_note(PARTLY_WRITTEN)
            raise
        return out

    def _prepared(self, plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
        """The plugin's answer, whose form is right."""
        from moe_core.prepared_form import fault_of, fault_of_load

        name, hook = plan.runner_plugin, "process_weights_after_loading"
        # A preparation may take the tensors out of their dict.
        num_experts = len(next(iter(weights.tensors.values())))
        devices = {tensor.device for tensor in weights.tensors.values()}
        prepared: PreparedWeights = self._ask(name, hook, plan=plan, weights=weights, out=out)
        fault = fault_of(prepared)
        if not fault and out is None:
            fault = fault_of_load(prepared, num_experts, plan.request.max_local_experts, devices)
        if fault:
            self._refuse(name, hook, fault)
        if out is not None and prepared is not out:
            self._refuse(name, hook, "expected the prepared weights given as out, refilled; got others")
        if prepared.layout != plan.weight_layout:
            self._refuse(name, hook, f"expected layout {plan.weight_layout!r}, got {prepared.layout!r}")
        return prepared

    def check_parameter_names(self, plan: MoEPlan, weights: PreparedWeights, owner: object) -> None:
        """Raise `PluginError` unless all tensors can become parameters of `owner`, beside the attributes it has."""
        if taken := [name for name in weights.tensors if hasattr(owner, name)]:
            kind = type(owner).__name__
            problem = f"tensors become attributes of {kind}, which has {', '.join(taken)} itself; give other names"
            self._refuse(plan.runner_plugin, "process_weights_after_loading", problem)

    def bind_experts(
        self, plan: MoEPlan, route: Route, weights: PreparedWeights, group: ExpertGroup
    ) -> ExpertsFn | FusedFn:
        """The route's experts function from its runner's plugin.

        Raises:
            PluginError: The weights have another layout than the runner reads; its plugin fails, or gives no function.
        """
        from moe_core.refill import Kept

        name = route.runner.plugin
        if weights.layout != route.runner.spec.weight_layout:
            raise PluginError(
                f"runner {route.runner.full_name} reads weight layout {route.runner.spec.weight_layout!r}, "
                f"these weights are {weights.layout!r}; prepare them from the raw weights"
            )
        kept = Kept.of(weights)
        experts = self._ask(name, "fused_experts", plan=plan, route=route, weights=weights, group=group)
        if changes := kept.changes(weights):
            kept.restore(weights)
            self._refuse(name, "fused_experts", f"prepared weights stay as they are; {', '.join(changes)}")
        if not callable(experts):
            self._refuse(name, "fused_experts", f"expected a function, got {type(experts).__name__}")
        return experts  # type: ignore[no-any-return]

    def _asked(self, candidate: Candidate, policy_only: bool) -> list[str]:
        policies = [name for name, spec in sorted(self._specs.items()) if not (spec.dispatchers or spec.runners)]
        return policies if policy_only else [*policies, candidate.runner.plugin]

    def _ask(self, plugin: str, hook: str, **arguments: Any) -> Any:
        """The plugin's answer; None if it does not implement the hook."""
        self.require(plugin)
        implementation = self._implementations[plugin].get(hook)
        if implementation is None:
            return None
        try:
            return implementation(**arguments)
        except MoeCoreError as error:
            note(error, f"raised by plugin {self._found[plugin]}, hook {hook}")
            raise
        except BaseException as error:
            # Whatever a hook raises is told with its plugin's name, an exit of its own included; but not the user's.
            if is_interrupt(error):
                raise
            raise PluginError(f"plugin {self._found[plugin]}, hook {hook}: {in_words(error)}") from error

    def _refuse(self, plugin: str, hook: str, problem: str) -> NoReturn:
        raise PluginError(f"plugin {self._found[plugin]}, hook {hook}: {problem}")


@functools.cache
def default_manager() -> BackendManager:
    """The installed plugins, loaded once per process; `default_manager.cache_clear()` looks again.

    Raises:
        UnknownNameError: The allow-list variable names a plugin that is not installed.
        PluginError: A plugin asks for the plugins while it is being loaded.
    """
    allowed = os.environ.get(ALLOW_LIST_VARIABLE)
    names = None if allowed is None else [name.strip() for name in allowed.split(",") if name.strip()]
    manager = BackendManager()
    manager.load(find(names, asked_by=f"environment variable {ALLOW_LIST_VARIABLE}"))
    return manager
