"""The experts function that transformers calls, and what it keeps beside each experts module.

Prepared experts are found by the module itself, weakly: they are no part of its parameters, its state dict, its copies
or its pickles, and they go when the module goes.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import attrs
import torch

from moe_core.environment import Environment
from moe_core.errors import UnsupportedModelError
from moe_core.integrations.transformers.prepared import PreparedExperts, Preparer
from moe_core.integrations.transformers.traits import is_experts, local_parameters
from moe_core.manager import BackendManager, default_manager
from moe_core.model_config import SIZE_NAMES
from moe_core.payloads import Tensor


def prepare(
    model: torch.nn.Module,
    *,
    environment: Environment | None = None,
    runner_backend: str | None = None,
    a2a_backend: str | None = None,
    manager: BackendManager | None = None,
) -> dict[str, PreparedExperts]:
    """Resolve, prepare and bind every experts module of a model, after it was loaded, moved and split.

    A module that is not prepared so is prepared at its first call, without pins. Which implementation the model selects
    is left as it is. Call again after replacing a gate or an activation function; replaced parameters are noticed.

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
    preparer = Preparer(
        manager=manager or default_manager(),
        environment=environment,
        a2a_backend=a2a_backend,
        runner_backend=runner_backend,
    )
    top_ks = {name: _configured_top_k(module) for name, module in experts.items()}
    prepared = {name: preparer.prepare(module, top_ks[name]) for name, module in experts.items()}
    for name, module in experts.items():
        _BESIDE[module] = _Beside.of(module, preparer, {top_ks[name]: prepared[name]})
    return prepared


def experts_forward(self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function behind `experts_implementation="moe_core"`; contract as in `PreparedExperts.__call__`.

    Inference only: a backward through the result raises `InputError`.
    """
    prepared: PreparedExperts = _prepared(self, top_k_index.shape[1])
    if torch.is_grad_enabled() and not hidden_states.requires_grad:
        # Gradients may be wanted of the weights alone; only a differentiable input makes the backward raise.
        hidden_states = hidden_states.detach().requires_grad_()
    return prepared(hidden_states, top_k_index, top_k_weights)


@attrs.define(eq=False)
class _Beside:
    """What is kept beside one module, valid as long as it has the parameters that were seen.

    The views keep the storage of those parameters alive, so that no other tensor can come to lie at their addresses.
    """

    preparer: Preparer
    by_top_k: dict[int, PreparedExperts]
    seen: tuple[Tensor, ...]
    stamp: tuple[object, ...]
    has_copies: bool

    @classmethod
    def of(cls, module: torch.nn.Module, preparer: Preparer, by_top_k: dict[int, PreparedExperts]) -> _Beside:
        tensors = (t for prepared in by_top_k.values() for t in prepared.bound.weights.tensors.values())
        has_copies = any(tensor.owned for tensor in tensors)
        seen = tuple(parameter.detach() for parameter in local_parameters(module).values())
        return cls(preparer, by_top_k, seen, _stamp(module, has_copies), has_copies)


_BESIDE: WeakKeyDictionary[torch.nn.Module, _Beside] = WeakKeyDictionary()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _prepared(module: torch.nn.Module, top_k: int) -> PreparedExperts:
    beside = _BESIDE.get(module)
    if beside is not None and beside.stamp == _stamp(module, beside.has_copies):
        by_top_k = beside.by_top_k
        if top_k in by_top_k:
            return by_top_k[top_k]
    else:
        by_top_k = {}
    preparer = beside.preparer if beside is not None else Preparer(manager=default_manager())
    by_top_k = {**by_top_k, top_k: preparer.prepare(module, top_k, by_top_k.values())}
    _BESIDE[module] = _Beside.of(module, preparer, by_top_k)
    return by_top_k[top_k]


def _stamp(module: torch.nn.Module, with_versions: bool) -> tuple[object, ...]:
    """Where a module's parameters lie and, if copies of them were made, how often they were written."""
    parameters = local_parameters(module).values()
    stamp: tuple[object, ...] = tuple((p.data_ptr(), p.shape, p.stride()) for p in parameters)
    if with_versions:
        stamp += tuple(0 if parameter.is_inference() else parameter._version for parameter in parameters)
    return stamp


def _configured_top_k(module: torch.nn.Module) -> int:
    """What the module's configuration says; a wrong one costs a second resolution at the first call, no more."""
    config = getattr(module, "config", None)
    found = (getattr(config, name, None) for name in SIZE_NAMES["top_k"])
    return next((value for value in found if isinstance(value, int) and value > 0), 1)
