"""The experts function that transformers calls, and `prepare`, which readies a whole model for it."""

from __future__ import annotations

import warnings

import torch
from torch.autograd import forward_ad

from moe_core.environment import Environment
from moe_core.errors import InputError, UnsupportedModelError, some_of
from moe_core.integrations.transformers.beside import keep, prepared_for
from moe_core.integrations.transformers.prepared import PreparedExperts, Preparer
from moe_core.integrations.transformers.quantized_experts import QuantizedExperts
from moe_core.integrations.transformers.traced import is_traced, traced_experts
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
    replacing a gate; replaced parameters and activation functions are noticed. Experts that `load_model` brought are
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
        keep(module, preparer, {calls[name]: prepared[name]})
    return prepared


def experts_forward(self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function behind `experts_implementation="moe_core"`; contract as in `PreparedExperts.__call__`."""
    if is_traced():
        return traced_experts(self, hidden_states, top_k_index, top_k_weights)
    if _has_tangent(hidden_states) or _has_tangent(top_k_weights):
        raise InputError("moe-core computes inference only: there is no derivative in forward mode; select 'eager'")
    if torch.is_grad_enabled() and not hidden_states.requires_grad and _wants_gradients(self):
        # Gradients are wanted of the weights alone; only a differentiable input makes the backward raise.
        hidden_states = hidden_states.detach().requires_grad_()
    prepared = prepared_for(self, (top_k_index.shape[1], hidden_states.dtype))
    return prepared(hidden_states, top_k_index, top_k_weights)


def _wants_gradients(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in local_parameters(module).values())


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _configured_dtype(module: torch.nn.Module) -> torch.dtype:
    """What to expect; a wrong one costs a second resolution at the first call, no more.

    Experts of floats have the dtype of their weights; quantized ones that of the model around them.
    """
    weights = [parameter for name, parameter in local_parameters(module).items() if name.endswith("_proj")]
    floats = [weight.dtype for weight in weights if weight.dtype in DTYPE_NAMES]
    configured = getattr(getattr(module, "config", None), "dtype", None)
    return next((dtype for dtype in (*floats, configured) if dtype in DTYPE_NAMES), torch.bfloat16)
