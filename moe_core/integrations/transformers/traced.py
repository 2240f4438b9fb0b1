"""The experts of a module as one opaque operator, for a model that `torch.compile` compiles, as a whole graph or not.

The parameters are arguments of the operator, so that who runs the graph knows what it reads: weights that are written
or replaced later are seen. The module is found by a number, which torch guards by the module's identity.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from packaging.version import Version

from moe_core.errors import InputError, UnsupportedModelError
from moe_core.integrations.transformers.beside import prepared_for
from moe_core.integrations.transformers.traits import local_parameters
from moe_core.payloads import Tensor

_MODULES: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
#: Older compilers take no module as argument of a function whose result is constant, as `_number` is.
HAS_WHOLE_GRAPHS = Version(torch.__version__) >= Version("2.13")


def is_traced() -> bool:
    """Whether this call is recorded rather than run."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def traced_experts(module: torch.nn.Module, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """What `experts_forward` does, while a compiler traces it: an operator of its graph, or between two graphs.

    Raises:
        UnsupportedModelError: The graph is to be exported or scripted; it would outlive the module.
    """
    if _is_exporting() or not torch.compiler.is_compiling():
        raise UnsupportedModelError(
            "a model whose experts moe-core runs cannot be exported or traced into a program of its own: the prepared "
            "layers are no part of it; select another experts_implementation for that, or use torch.compile"
        )
    if not HAS_WHOLE_GRAPHS:
        # Nothing follows: it would be traced as a graph of its own, with a warning about the gradient of its input.
        return _between_graphs(module, hidden_states, ids, weights)  # type: ignore[no-any-return]
    if _is_transformed():
        raise InputError(
            "moe-core computes inference only: torch.func has no derivative of these experts and no batch of them; "
            "select 'eager'"
        )
    parameters = list(local_parameters(module).values())
    is_lowered = torch.is_autocast_enabled(hidden_states.device.type)
    out: Tensor = traced_experts_op(hidden_states, ids, weights, parameters, _number(module), is_lowered)
    return out


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="torch before 2.13 compiles no whole graph over experts that moe-core runs"
)
def _between_graphs(module: torch.nn.Module, *arguments: Tensor) -> Tensor:
    out: Tensor = module(*arguments)
    return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    # Asked while it traces, torch 2.11 says yes to every compiler.
    return torch.compiler.is_exporting()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_transformed() -> bool:
    # An operator without a rule for forward mode would have the derivative zero.
    return torch._C._functorch.peek_interpreter_stack() is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number(module: torch.nn.Module) -> int:
    _MODULES[id(module)] = module
    return id(module)


@torch.library.custom_op("moe_core::traced_experts", mutates_args=())
def traced_experts_op(
    hidden_states: Tensor, ids: Tensor, weights: Tensor, parameters: list[Tensor], number: int, is_lowered: bool
) -> Tensor:
    """The experts of module `number`, whose own parameters must be `parameters`; `is_lowered` is under autocast.

    Raises:
        InputError: They are others, for example those of `torch.func.functional_call`.
    """
    module = _MODULES[number]
    own = [parameter.data_ptr() for parameter in local_parameters(module).values()]
    if own != [parameter.data_ptr() for parameter in parameters]:
        raise InputError(
            f"{type(module).__qualname__}: a compiled graph brings other parameters than the module has; "
            "moe-core reads the module's own, so write them there"
        )
    prepared = prepared_for(module, (ids.shape[1], hidden_states.dtype))
    # A compiled graph runs without it: its casts are in the graph.
    autocast = torch.autocast(hidden_states.device.type) if is_lowered else contextlib.nullcontext()
    with autocast:
        out: Tensor = prepared(hidden_states, ids, weights)
    return out


@traced_experts_op.register_fake
def _fake(hidden_states: Tensor, *_: object) -> Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


@torch.library.custom_op("moe_core::no_gradient", mutates_args=())
def _no_gradient(gradient: Tensor, of: Tensor) -> Tensor:
    """Refuses when it runs: while a backward is only traced, nobody has asked for it yet."""
    raise InputError("moe-core computes inference only: there is no gradient; train with the model's own experts")


@_no_gradient.register_fake
def _fake_gradient(gradient: Tensor, of: Tensor) -> Tensor:
    return torch.empty_like(of)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden_states, _, weights, parameters, *_ = inputs
    ctx.save_for_backward(hidden_states, weights, *parameters)


def _refuse(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    found = [_no_gradient(gradient, tensor) if tensor.requires_grad else None for tensor in ctx.saved_tensors]
    hidden_states, weights, *parameters = found
    return hidden_states, None, weights, parameters, None, None


traced_experts_op.register_autograd(_refuse, setup_context=_remember)
