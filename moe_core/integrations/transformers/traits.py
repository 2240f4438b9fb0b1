"""What a decorated experts module says about itself, and every trait of it that is not understood."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.nn.utils.parametrize import is_parametrized

from moe_core.errors import UnsupportedModelError
from moe_core.integrations.transformers.fp8 import Fp8Format, format_problems, read_format
from moe_core.model_config import SIZE_NAMES
from moe_core.payloads import TORCH_DTYPES, Tensor

#: The value of `experts_implementation` that selects moe-core.
NAME = "moe_core"
#: Torch dtype -> the project's word for it.
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# What every decorated module has, and what came with later versions.
_OLDEST_FLAGS = ("is_transposed", "has_bias")


@attrs.frozen(kw_only=True)
class Flags:
    """The flags of `use_experts_implementation`; defaults are those of versions that did not have them yet."""

    is_transposed: bool
    has_bias: bool
    has_gate: bool = True
    is_concatenated: bool = True
    has_post_expert_norm: bool = False
    #: How FP8 experts store their numbers; None for experts of floats.
    fp8: Fp8Format | None = None

    @property
    def halves(self) -> int:
        """Matrices that the first projection stacks: gate and up, or one."""
        return 2 if self.has_gate else 1

    @property
    def first_name(self) -> str:
        """Name of the first projection's parameter."""
        return "gate_up_proj" if self.has_gate else "up_proj"

    @property
    def gate_name(self) -> str:
        """Name of the callable between the projections."""
        return "_apply_gate" if self.has_gate else "act_fn"

    @property
    def weight_names(self) -> dict[str, str]:
        """Canonical name -> name of the parameter, for everything that must exist."""
        more = self.fp8.scale_names(self.first_name) if self.fp8 is not None else {}
        names = {"w13": self.first_name, "w2": "down_proj"}
        if self.has_bias:
            names |= {"b13": f"{self.first_name}_bias", "b2": "down_proj_bias"}
        return names | more


def is_experts(module: torch.nn.Module) -> bool:
    """Whether transformers dispatches this module through a registry of experts functions."""
    return all(name in vars(module) for name in _OLDEST_FLAGS) and hasattr(module, "_apply_gate")


def local_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """The module's own parameters that exist; of one that is split over ranks, this rank's part."""
    # Read from the dict: attribute access of a module is slow, and this runs in every forward.
    found = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    return {name: p.to_local() if hasattr(p, "to_local") else p for name, p in found.items()}


def configured_top_k(module: torch.nn.Module) -> int:
    """What the module's configuration says; a wrong one costs a second resolution at the first call, no more."""
    config = getattr(module, "config", None)
    found = (getattr(config, name, None) for name in SIZE_NAMES["top_k"])
    return next((value for value in found if isinstance(value, int) and value > 0), 1)


def state_names(module: torch.nn.Module) -> list[str]:
    """Names of all parameters and buffers in a module."""
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


def read_flags(module: torch.nn.Module, *, with_data: bool = True) -> Flags:
    """The flags of an experts module, after a check that they tell all about it.

    Args:
        module: The module; left as it is.
        with_data: Whether its parameters must have memory.

    Raises:
        UnsupportedModelError: Names the class and lists every trait that is not understood.
    """
    if not is_experts(module):
        raise UnsupportedModelError(
            f"{type(module).__qualname__} is no experts module of transformers: its class is not decorated with "
            "use_experts_implementation"
        )
    found = {field.name: getattr(module, field.name) for field in attrs.fields(Flags) if hasattr(module, field.name)}
    flags = Flags(**{**found, "fp8": read_format(module)})
    tensors = local_parameters(module)
    problems = [
        *_signature_problems(type(module)),
        *_missing_parameters(module, set(flags.weight_names.values()) - set(tensors)),
        *_parameter_problems(tensors, flags, with_data),
        *_fp8_problems(tensors, flags),
        *_state_problems(module, flags),
        *_attribute_problems(module, flags),
    ]
    if problems:
        name = f"{type(module).__qualname__} of {type(module).__module__}"
        raise UnsupportedModelError(
            f"moe-core does not understand the experts module {name}:\n  "
            + "\n  ".join(problems)
            + "\nselect another experts_implementation for this model, for example 'eager'"
        )
    return flags


def _signature_problems(experts_class: type[torch.nn.Module]) -> Iterator[str]:
    parameters = list(inspect.signature(experts_class.forward).parameters.values())[1:]
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not len(parameters) == len(plain) == 3:
        listed = ", ".join(map(str, parameters))
        yield f"its forward takes ({listed}); expected hidden states, expert ids and router weights, nothing more"


def _missing_parameters(module: torch.nn.Module, names: set[str]) -> Iterator[str]:
    for name in sorted(names):
        if is_parametrized(module, name):
            yield (
                f"parameter {name} is computed by a parametrization in every forward, as adapters do it; merge that "
                "into the weights first (torch.nn.utils.parametrize.remove_parametrizations)"
            )
        elif isinstance(getattr(module, name, None), torch.Tensor):
            yield f"{name} is a plain tensor; expected a parameter"
        else:
            yield f"parameter {name} is missing"


def _parameter_problems(tensors: dict[str, Tensor], flags: Flags, with_data: bool) -> Iterator[str]:
    expected = set(flags.weight_names.values())
    for name, tensor in tensors.items():
        if name not in expected:
            listed = ", ".join(sorted(expected))
            yield f"unknown parameter {name} {list(tensor.shape)}; its flags tell of {listed} and no other"
        elif flags.fp8 is None and tensor.dtype not in DTYPE_NAMES:
            known = ", ".join(TORCH_DTYPES)
            yield f"parameter {name} is {tensor.dtype}; experts of this class hold {known} weights"
        elif with_data and tensor.device.type == "meta":
            yield f"parameter {name} is on the meta device; load the weights first"
        elif name in (flags.first_name, "down_proj") and tensor.dim() != 3:
            yield f"parameter {name} has shape {list(tensor.shape)}; expected one matrix per expert"


def _fp8_problems(tensors: dict[str, Tensor], flags: Flags) -> Iterator[str]:
    if flags.fp8 is None:
        return
    if flags.is_transposed or not flags.is_concatenated:
        yield "FP8 experts that are transposed or interleave gate and up are not known"
    yield from format_problems(flags.fp8, tensors, flags.first_name, flags.halves)


def _state_problems(module: torch.nn.Module, flags: Flags) -> Iterator[str]:
    """Buffers and submodules that a forward could use besides the flags, also such as act in training alone."""
    helpers = ("act_fn", "post_expert_norm") if flags.has_post_expert_norm else ("act_fn",)
    yield from (f"unknown buffer {name}" for name, _ in module.named_buffers(recurse=False))
    for name, child in module.named_children():
        if name not in helpers and not (name == "parametrizations" and is_parametrized(module)):
            state = [f"unknown state {name}.{key} of a submodule" for key in state_names(child)]
            yield from state or [f"unknown submodule {name} ({type(child).__qualname__})"]


def _attribute_problems(module: torch.nn.Module, flags: Flags) -> Iterator[str]:
    if not isinstance(getattr(module, "num_experts", None), int):
        yield "attribute num_experts is missing or no int"
    function = getattr(module, flags.gate_name, None)
    if not callable(function):
        yield f"has_gate is {flags.has_gate}, but {flags.gate_name} is missing"
    elif not _takes_rows_alone(function):
        signature = inspect.signature(function)
        yield f"{flags.gate_name} takes {signature}; expected the rows of the first projection, nothing more"
    if flags.has_post_expert_norm and not callable(getattr(module, "post_expert_norm", None)):
        yield "has_post_expert_norm is set, but post_expert_norm is missing"


def _takes_rows_alone(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:
        # A built-in function that tells no signature.
        return True
    return True
