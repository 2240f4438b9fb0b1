"""What one experts module of transformers is, read from its flags: sizes, activation, and views of its parameters."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from moe_core.activation import ActivationSpec
from moe_core.errors import UnsupportedModelError
from moe_core.integrations.transformers.gates import recognise
from moe_core.payloads import ActivationFn, RawWeights, Tensor
from moe_core.request import LayerRequest
from moe_core.weights.canonical import canonical_orientation
from moe_core.weights.expected import FLOAT

_DTYPE_NAMES = {dtype: name for name, dtype in FLOAT.items()}
# What a decorated class always has, and what came later with its default.
_FLAGS = ("is_transposed", "has_bias")
_LATER_FLAGS = {"has_gate": True, "is_concatenated": True, "has_post_expert_norm": False}
_POST_NORM = "post_expert_norm"


@attrs.frozen(kw_only=True)
class ExpertsLayout:
    """One experts module in the project's words; equal for modules that compute the same on other weights.

    Attributes:
        num_experts: Experts whose weights the module holds (of this rank, if they are split).
        hidden_size: H.
        intermediate_size: I (of this rank, if it is split).
        dtype: Of the weights, hence of the tokens: `fp32`, `bf16` or `fp16`.
        device_type: Where the weights lie.
        activation: Between the projections.
        in_out: Whether the projections are stored `[E, in, out]`.
        bias: Whether both projections have biases.
        post_norm: Whether a norm follows each expert.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: str
    device_type: str
    activation: ActivationSpec
    in_out: bool
    bias: bool
    post_norm: bool

    def request(self, top_k: int, **pins: Any) -> LayerRequest:
        """The layer as transformers calls it: ids are local, and whoever splits experts or rows reduces the output."""
        return LayerRequest(
            num_experts=self.num_experts,
            top_k=top_k,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            activation=self.activation,
            dtype=self.dtype,
            bias=self.bias,
            post_norm=self.post_norm,
            **pins,
        )


def is_experts(module: torch.nn.Module) -> bool:
    """Whether transformers dispatches this module through a registry of experts functions."""
    return all(name in vars(module) for name in _FLAGS) and hasattr(module, "_apply_gate")


def local_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """The module's own parameters that exist; of one that is split over ranks, this rank's part."""
    # Read from the dict: attribute access of a module is slow, and this runs in every forward.
    found = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    return {name: p.to_local() if hasattr(p, "to_local") else p for name, p in found.items()}


def read_layout(module: torch.nn.Module) -> ExpertsLayout:
    """Read the flags of a decorated experts module and prove that nothing else matters.

    Raises:
        UnsupportedModelError: Lists every trait that is not understood.
    """
    flags = {**{name: getattr(module, name) for name in _FLAGS}, **_later_flags(module)}
    tensors = local_parameters(module)
    problems = [
        *_signature_problems(type(module)),
        *_tensor_problems(module, tensors, flags),
        *_other_problems(module, flags),
    ]
    if problems:
        listed = "\n  ".join(problems)
        raise UnsupportedModelError(
            f"moe-core does not understand the experts module {type(module).__qualname__} ({type(module).__module__}):\n"
            f"  {listed}\nselect another experts_implementation for this model, for example 'eager'"
        )
    down = tensors["down_proj"]
    _, hidden_size, intermediate_size = (down.mT if flags["is_transposed"] else down).shape
    return ExpertsLayout(
        num_experts=int(module.num_experts),  # type: ignore[arg-type]
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=_DTYPE_NAMES[down.dtype],
        device_type=down.device.type,
        activation=_activation(module, intermediate_size, flags, down.device),
        in_out=flags["is_transposed"],
        bias=flags["has_bias"],
        post_norm=flags["has_post_expert_norm"],
    )


def borrow_weights(module: torch.nn.Module, layout: ExpertsLayout) -> RawWeights:
    """Canonical views of the module's parameters; nothing is copied, and the module is not kept alive."""
    orientation = "in_out" if layout.in_out else "out_in"
    tensors = local_parameters(module)
    first = "gate_up_proj" if layout.activation.gated else "up_proj"
    names = {"w13": first, "w2": "down_proj"}
    if layout.bias:
        names |= {"b13": f"{first}_bias", "b2": "down_proj_bias"}
    views = {name: tensors[stored].detach() for name, stored in names.items()}
    turned = {name: canonical_orientation(t, orientation) if t.dim() == 3 else t for name, t in views.items()}
    own_gate = "_apply_gate" if layout.activation.gated else "act_fn"
    return RawWeights(
        tensors=turned,
        activation=_live(module, own_gate) if layout.activation.kind == "module" else None,
        post_norm=_live(module, _POST_NORM) if layout.post_norm else None,
    )


def _live(module: torch.nn.Module, name: str) -> ActivationFn:
    """The module's own callable, looked up at each call; a bound method would keep the module alive for ever."""
    owner = weakref.ref(module)

    def call(rows: Tensor) -> Tensor:
        return getattr(owner(), name)(rows)  # type: ignore[no-any-return]

    return call


def _later_flags(module: torch.nn.Module) -> dict[str, bool]:
    return {name: getattr(module, name, default) for name, default in _LATER_FLAGS.items()}


@functools.cache
def _signature_problems(experts_class: type[torch.nn.Module]) -> tuple[str, ...]:
    parameters = list(inspect.signature(experts_class.forward).parameters.values())[1:]
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(parameters) == len(plain) == 3:
        return ()
    listed = ", ".join(map(str, parameters))
    return (f"its forward takes ({listed}); expected hidden states, expert ids and router weights, and nothing more",)


def _tensor_problems(module: torch.nn.Module, tensors: dict[str, Tensor], flags: dict[str, bool]) -> Iterator[str]:
    """Parameters and buffers that are missing, unknown, or of a kind that this version does not read."""
    first = "gate_up_proj" if flags["has_gate"] else "up_proj"
    weights = (first, "down_proj")
    expected = {*weights, *(f"{name}_bias" for name in weights if flags["has_bias"])}
    yield from (f"parameter {name} is missing" for name in sorted(expected - set(tensors)))
    yield from (
        f"unknown parameter {name} {list(tensors[name].shape)}; its flags tell of {', '.join(sorted(expected))}"
        for name in sorted(set(tensors) - expected)
    )
    for name in sorted(expected & set(tensors)):
        tensor = tensors[name]
        if tensor.dtype not in _DTYPE_NAMES:
            yield f"parameter {name} is {tensor.dtype}; this version reads unquantized {', '.join(FLOAT)} weights only"
        if tensor.device.type == "meta":
            yield f"parameter {name} is on the meta device; load the weights first"
        if name in weights and tensor.dim() != 3:
            yield f"parameter {name} has shape {list(tensor.shape)}; expected one matrix per expert"
    helpers = {"act_fn", _POST_NORM} if flags["has_post_expert_norm"] else {"act_fn"}
    foreign = {name: child for name, child in module.named_children() if name not in helpers}
    states = [
        *(name for name, buffer in module.named_buffers(recurse=False) if buffer is not None),
        *(f"{name}.{key}" for name, child in foreign.items() for key in _state_names(child)),
    ]
    yield from (f"unknown state {name}" for name in states)


def _other_problems(module: torch.nn.Module, flags: dict[str, bool]) -> Iterator[str]:
    if not isinstance(getattr(module, "num_experts", None), int):
        yield "attribute num_experts is missing or no int"
    if not flags["has_gate"] and not callable(getattr(module, "act_fn", None)):
        yield "it has no gate (has_gate=False) and no act_fn either"
    if flags["has_post_expert_norm"] and not callable(getattr(module, _POST_NORM, None)):
        yield f"has_post_expert_norm is set, but {_POST_NORM} is missing"


def _state_names(module: torch.nn.Module) -> list[str]:
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


def _activation(
    module: torch.nn.Module, intermediate_size: int, flags: dict[str, bool], device: torch.device
) -> ActivationSpec:
    """A known activation if the module's gate is proven equal to one, else `kind="module"`: the gate itself."""
    gated = flags["has_gate"]
    function: ActivationFn = getattr(module, "_apply_gate" if gated else "act_fn")
    row_order = "gate_up" if flags["is_concatenated"] or not gated else "interleaved"
    act_fn = getattr(module, "act_fn", None)
    # A gate with weights or other state of its own may compute something else after the next load.
    if not (isinstance(act_fn, torch.nn.Module) and _state_names(act_fn)):
        known = recognise(
            function,
            intermediate_size,
            gated=gated,
            row_order=row_order,
            limits=_numbers(module, "limit"),
            alphas=_numbers(module, "alpha"),
            device=device,
        )
        if known is not None:
            return known
    return ActivationSpec(kind="module", gated=gated, row_order=row_order)


def _numbers(module: torch.nn.Module, word: str) -> tuple[float, ...]:
    """Positive numbers among the module's attributes whose names contain `word`: where to look, not what to believe."""
    found = (value for name, value in vars(module).items() if word in name and isinstance(value, int | float))
    return tuple(sorted({float(value) for value in found if math.isfinite(value) and value > 0}))
