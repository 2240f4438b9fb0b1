"""The experts function that transformers calls, and what it keeps beside each experts module.

Prepared experts are found by the module itself, weakly: they are no part of its parameters, its state dict, its copies
or its pickles, and they go when the module goes.
"""

from __future__ import annotations

import warnings
from typing import TypeAlias
from weakref import WeakKeyDictionary

import attrs
import torch

from moe_core.environment import Environment
from moe_core.errors import InputError, UnsupportedModelError, some_of
from moe_core.integrations.transformers.prepared import PreparedExperts, Preparer
from moe_core.integrations.transformers.quantized_experts import QuantizedExperts
from moe_core.integrations.transformers.traits import DTYPE_NAMES, NAME, configured_top_k, is_experts, local_parameters
from moe_core.manager import BackendManager, default_manager
from moe_core.measurements import MeasurementTable
from moe_core.payloads import Tensor


def prepare(
    model: torch.nn.Module,
    *,
    environment: Environment | None = None,
    runner_backend: str | None = None,
    a2a_backend: str | None = None,
    manager: BackendManager | None = None,
    measurements: MeasurementTable | None = None,
) -> dict[str, PreparedExperts]:
    """Resolve, prepare and bind every experts module of a model, after it was loaded, moved and split.

    A module that is not prepared so is prepared at its first call, without pins. Which implementation the model selects
    is left as it is; where that is another one, which then goes on running, a warning says so. Call again after
    replacing a gate or an activation function; replaced parameters are noticed. Experts that `load_model` brought are
    prepared already; they are listed too.

    Args:
        model: Any module that contains experts modules of transformers.
        environment: The machine; default: this one, probed, as seen from the device of each module's parameters.
        runner_backend: Pin of the runner.
        a2a_backend: Pin of the dispatcher.
        manager: The plugins; default: the installed ones.
        measurements: Measured times that rank the candidates; default: the user's and the shipped ones; an empty table
            leaves them out.

    Returns:
        Module name -> what serves it.

    Raises:
        UnsupportedModelError: No experts module, or one with a trait that is not understood, or whose own forward
            computes something else than its flags say.
        ResolutionError: Nothing fits, or a pin does not; the message lists candidates and reasons.
        InputError: The environment is of another device type than the parameters, or something is
            given for experts that `load_model` has prepared.
    """
    preparer = Preparer(
        manager=manager or default_manager(),
        environment=environment,
        a2a_backend=a2a_backend,
        runner_backend=runner_backend,
        measurements=measurements,
    )
    loaded = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedExperts)}
    if loaded and (environment, a2a_backend, runner_backend, manager, measurements) != (None,) * 5:
        raise InputError(
            f"the quantized experts of {some_of(loaded)} were prepared when they were loaded; give pins, environment "
            "and measured times to load_model"
        )
    prepared = {name: module.prepared for name, module in loaded.items()}
    prepared |= prepare_modules(model, preparer, bool(loaded))
    _warn_of_other_implementations(model)
    return prepared


def _warn_of_other_implementations(model: torch.nn.Module) -> None:
    selected = {chosen for module in model.modules() if is_experts(module) and (chosen := _selected(module)) != NAME}
    if selected:
        warnings.warn(
            f"experts of {type(model).__name__} are prepared, but the model runs its implementation "
            f"{', '.join(sorted(selected))}: load it with experts_implementation={NAME!r}, or call "
            f"set_experts_implementation({NAME!r}) on it",
            stacklevel=3,
        )


def _selected(module: torch.nn.Module) -> str:
    """The implementation that a module's configuration selects; transformers takes eager where it selects none."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None) or "eager"


def prepare_modules(
    model: torch.nn.Module, preparer: Preparer, may_be_none: bool = False
) -> dict[str, PreparedExperts]:
    """`prepare` with the choices of `preparer`, for the modules whose weights are their own."""
    experts = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not experts and not may_be_none:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no experts module that transformers dispatches by experts_implementation; "
            "classes are decorated with use_experts_implementation for that"
        )
    calls = {name: (configured_top_k(module), _configured_dtype(module)) for name, module in experts.items()}
    prepared = {name: preparer.prepare(module, *calls[name]) for name, module in experts.items()}
    for name, module in experts.items():
        _BESIDE[module] = _Beside.of(module, preparer, {calls[name]: prepared[name]})
    return prepared


def experts_forward(self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function behind `experts_implementation="moe_core"`; contract as in `PreparedExperts.__call__`."""
    prepared: PreparedExperts = _prepared(self, (top_k_index.shape[1], hidden_states.dtype))
    return prepared(hidden_states, top_k_index, top_k_weights)


#: What the arguments of a call tell about the layer: experts per token, and the dtype of the tokens.
_Call: TypeAlias = tuple[int, torch.dtype]


@attrs.define(eq=False)
class _Beside:
    """What is kept beside one module, valid as long as it has the parameters that were seen.

    The views keep the storage of those parameters alive, so that no other tensor can come to lie at their addresses.
    """

    preparer: Preparer
    by_call: dict[_Call, PreparedExperts]
    seen: tuple[Tensor, ...]
    stamp: tuple[object, ...]
    has_copies: bool

    @classmethod
    def of(cls, module: torch.nn.Module, preparer: Preparer, by_call: dict[_Call, PreparedExperts]) -> _Beside:
        tensors = (t for prepared in by_call.values() for t in prepared.bound.weights.tensors.values())
        has_copies = any(tensor.owned for tensor in tensors)
        seen = tuple(parameter.detach() for parameter in local_parameters(module).values())
        return cls(preparer, by_call, seen, _stamp(module, has_copies), has_copies)


_BESIDE: WeakKeyDictionary[torch.nn.Module, _Beside] = WeakKeyDictionary()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _prepared(module: torch.nn.Module, call: _Call) -> PreparedExperts:
    beside = _BESIDE.get(module)
    if beside is not None and beside.stamp == _stamp(module, beside.has_copies):
        by_call = beside.by_call
        if call in by_call:
            return by_call[call]
    else:
        by_call = {}
    preparer = beside.preparer if beside is not None else Preparer(manager=default_manager())
    by_call = {**by_call, call: preparer.prepare(module, *call, by_call.values())}
    _BESIDE[module] = _Beside.of(module, preparer, by_call)
    return by_call[call]


def _stamp(module: torch.nn.Module, with_versions: bool) -> tuple[object, ...]:
    """Where a module's parameters lie and, if copies of them were made, how often they were written."""
    parameters = local_parameters(module).values()
    stamp: tuple[object, ...] = tuple((p.data_ptr(), p.shape, p.stride()) for p in parameters)
    if with_versions:
        stamp += tuple(0 if parameter.is_inference() else parameter._version for parameter in parameters)
    return stamp


def _configured_dtype(module: torch.nn.Module) -> torch.dtype:
    """What to expect; a wrong one costs a second resolution at the first call, no more.

    Experts of floats have the dtype of their weights; quantized ones that of the model around them.
    """
    weights = [parameter for name, parameter in local_parameters(module).items() if name.endswith("_proj")]
    floats = [weight.dtype for weight in weights if weight.dtype in DTYPE_NAMES]
    configured = getattr(getattr(module, "config", None), "dtype", None)
    return next((dtype for dtype in (*floats, configured) if dtype in DTYPE_NAMES), torch.bfloat16)
