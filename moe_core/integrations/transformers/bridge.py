"""The experts function that transformers calls, and what it keeps beside each experts module.

Prepared experts are found by the module itself, weakly: they are no part of its parameters, its state dict, its copies or
its pickles, and they go when the module goes.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import attrs
import torch

from moe_core.bound import BoundExperts
from moe_core.decision import Decision
from moe_core.environment import Environment, probe_environment
from moe_core.errors import InputError, UnsupportedModelError, WeightsError
from moe_core.integrations.transformers.layout import (
    ExpertsLayout,
    borrow_weights,
    is_experts,
    local_parameters,
    read_layout,
)
from moe_core.integrations.transformers.selfcheck import check_against_eager
from moe_core.manager import BackendManager, default_manager
from moe_core.payloads import PreparedWeights, Tensor
from moe_core.plan import MoEPlan
from moe_core.planner import make_plan
from moe_core.weights.expected import check_weights


@attrs.define(eq=False, kw_only=True)
class PreparedExperts:
    """One experts module, resolved and bound for one top-k.

    Attributes:
        plan: The finished choice.
        decision: Why.
        bound: What runs; its weights are views of the module's parameters wherever the backend reads them as they lie.
    """

    plan: MoEPlan
    decision: Decision
    bound: BoundExperts

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts on transformers' arguments.

        Args:
            hidden_states: `[T, H]` in the dtype of the weights.
            top_k_index: `[T, K]` integer ids of this rank's experts; any id out of range means "not on this rank".
            top_k_weights: `[T, K]`, any float dtype.

        Returns:
            `[T, H]`, dtype of `hidden_states`.
        """
        request = self.plan.request
        # Expert parallelism marks experts of other ranks by one id past the last; backends know -1 alone.
        local = top_k_index.clamp(0, request.num_experts - 1) == top_k_index
        topk_ids = torch.where(local, top_k_index, -1)
        num_slots = topk_ids.shape[1]
        if num_slots == request.top_k:
            return self.bound(hidden_states, topk_ids, top_k_weights)
        # A rank with fewer experts than a token has slots: each slot becomes a token.
        rows = hidden_states.repeat_interleave(num_slots, dim=0)
        out = self.bound(rows, topk_ids.reshape(-1, 1), top_k_weights.reshape(-1, 1))
        return out.view(-1, num_slots, out.shape[-1]).sum(dim=1, dtype=torch.float32).to(out.dtype)


@attrs.define(eq=False, kw_only=True)
class _Choices:
    """What the user said about a model's layers; also remembers what was probed."""

    manager: BackendManager
    environment: Environment | None = None
    a2a_backend: str | None = None
    runner_backend: str | None = None
    _probed: dict[str, Environment] = attrs.field(factory=dict, init=False)

    def environment_for(self, device_type: str) -> Environment:
        """The machine as seen from one device type."""
        if self.environment is not None:
            if self.environment.device_type != device_type:
                raise InputError(
                    f"the environment ({self.environment.source}) is of device type {self.environment.device_type!r}, the "
                    f"experts lie on {device_type!r}; call prepare with an environment of that type, or with none"
                )
            return self.environment
        if device_type not in self._probed:
            self._probed[device_type] = probe_environment(self.manager.modules_required(), device_type)
        return self._probed[device_type]


@attrs.define(eq=False, kw_only=True)
class _Beside:
    """What is kept beside one module: valid as long as its parameters are the ones that `stamp` saw."""

    choices: _Choices
    stamp: tuple[int, ...]
    owns_copies: bool
    by_top_k: dict[int, PreparedExperts]


_BESIDE: WeakKeyDictionary[torch.nn.Module, _Beside] = WeakKeyDictionary()

# Where configurations keep the experts per token. A wrong one costs a second resolution at the first call, no more.
_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts", "moe_k", "top_k")


def prepare(
    model: torch.nn.Module,
    *,
    environment: Environment | None = None,
    runner_backend: str | None = None,
    a2a_backend: str | None = None,
    manager: BackendManager | None = None,
) -> dict[str, PreparedExperts]:
    """Resolve, prepare and bind every experts module of a model, after it was loaded, moved and split.

    Whatever is not prepared so is prepared at its first call, with no pins. Which implementation the model selects is left
    as it is. Call again after changing a gate or an activation function of a module.

    Args:
        model: Any module that contains experts modules of transformers.
        environment: The machine; default: this one, probed, as seen from the device of each module's parameters.
        runner_backend: Pin of the runner.
        a2a_backend: Pin of the dispatcher.
        manager: The plugins; default: the installed ones.

    Returns:
        Module name -> what serves it.

    Raises:
        UnsupportedModelError: No experts module, or one with a trait that is not understood, or whose own forward
            computes something else than its flags say.
        ResolutionError: Nothing fits, or a pin does not; the message lists candidates and reasons.
        InputError: The environment is of another device type than the parameters.
    """
    experts = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not experts:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no experts module that transformers dispatches by experts_implementation; "
            "classes are decorated with use_experts_implementation for that"
        )
    choices = _Choices(
        manager=manager or default_manager(),
        environment=environment,
        a2a_backend=a2a_backend,
        runner_backend=runner_backend,
    )
    checked: set[tuple[type, ExpertsLayout]] = set()
    prepared = {}
    for name, module in experts.items():
        _BESIDE.pop(module, None)
        prepared[name] = _prepare_module(module, _configured_top_k(module), choices, checked)
    return prepared


@torch.compiler.disable
def _prepared(module: torch.nn.Module, top_k: int) -> PreparedExperts:
    beside = _BESIDE.get(module)
    if beside is None:
        return _prepare_module(module, top_k, _Choices(manager=default_manager()), set())
    if beside.stamp != _stamp(module, beside.owns_copies):
        # Other parameters than those prepared: moved, cast or assigned.
        del _BESIDE[module]
        return _prepare_module(module, top_k, beside.choices, set())
    found = beside.by_top_k.get(top_k)
    return found or _prepare_module(module, top_k, beside.choices, set())


def experts_forward(
    self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function behind `experts_implementation="moe_core"`; contract as in `PreparedExperts.__call__`.

    Inference only: a backward through the result raises `InputError`.
    """
    prepared = _prepared(self, top_k_index.shape[1])
    if torch.is_grad_enabled() and not hidden_states.requires_grad:
        # Gradients may be wanted of the weights alone; only a differentiable input makes the backward raise.
        hidden_states = hidden_states.detach().requires_grad_()
    return prepared(hidden_states, top_k_index, top_k_weights)


def _prepare_module(
    module: torch.nn.Module, top_k: int, choices: _Choices, checked: set[tuple[type, ExpertsLayout]]
) -> PreparedExperts:
    layout = read_layout(module)
    environment = choices.environment_for(layout.device_type)
    request = layout.request(
        top_k=top_k if top_k <= layout.num_experts else 1,
        a2a_backend=choices.a2a_backend,
        runner_backend=choices.runner_backend,
    )
    plan, decision = make_plan(choices.manager, request, environment)
    weights = _shared_weights(module, plan) or _prepare_weights(module, layout, plan, choices.manager)
    prepared = PreparedExperts(plan=plan, decision=decision, bound=BoundExperts(plan, weights, choices.manager))
    if (type(module), layout) not in checked:
        check_against_eager(module, prepared, layout.num_experts)
        checked.add((type(module), layout))
    _keep(module, top_k, prepared, choices)
    return prepared


def _prepare_weights(
    module: torch.nn.Module, layout: ExpertsLayout, plan: MoEPlan, manager: BackendManager
) -> PreparedWeights:
    raw = borrow_weights(module, layout)
    try:
        check_weights(raw, plan.request, layout.num_experts)
    except WeightsError as error:
        raise UnsupportedModelError(f"{type(module).__qualname__} does not have the shapes its flags say: {error}") from error
    return manager.process_weights(plan, raw, None)


def _shared_weights(module: torch.nn.Module, plan: MoEPlan) -> PreparedWeights | None:
    """Weights already prepared for another top-k of this module, if the plan reads the same layout."""
    beside = _BESIDE.get(module)
    for other in beside.by_top_k.values() if beside else ():
        if (other.plan.runner_plugin, other.plan.weight_layout) == (plan.runner_plugin, plan.weight_layout):
            return other.bound.weights
    return None


def _keep(module: torch.nn.Module, top_k: int, prepared: PreparedExperts, choices: _Choices) -> None:
    beside = _BESIDE.get(module)
    if beside is None:
        owns_copies = any(tensor.owned for tensor in prepared.bound.weights.tensors.values())
        stamp = _stamp(module, owns_copies)
        beside = _Beside(choices=choices, stamp=stamp, owns_copies=owns_copies, by_top_k={})
        _BESIDE[module] = beside
    beside.by_top_k[top_k] = prepared


def _stamp(module: torch.nn.Module, with_versions: bool) -> tuple[int, ...]:
    """Which parameters a module has: where they lie and, if copies of them were made, how often they were written.

    An address cannot be given to another tensor meanwhile: the views keep the old storage alive.
    """
    parameters = local_parameters(module).values()
    stamp = tuple(parameter.data_ptr() for parameter in parameters)
    if with_versions:
        stamp += tuple(0 if parameter.is_inference() else parameter._version for parameter in parameters)
    return stamp


def _configured_top_k(module: torch.nn.Module) -> int:
    config = getattr(module, "config", None)
    found = (getattr(config, name, None) for name in _TOP_K_NAMES)
    return next((value for value in found if isinstance(value, int) and value > 0), 1)
