"""One experts module of transformers in the project's words: sizes, activation, and views of its parameters."""

from __future__ import annotations

import math
import weakref
from typing import Any

import attrs
import torch

from moe_core.activation import ActivationSpec
from moe_core.errors import InputError
from moe_core.integrations.transformers.fp8 import canonical_view, read_quant
from moe_core.integrations.transformers.gates import recognise
from moe_core.integrations.transformers.traits import DTYPE_NAMES, Flags, local_parameters, read_flags, state_names
from moe_core.kernels.dequantize import num_columns
from moe_core.payloads import ActivationFn, RawWeights, Tensor
from moe_core.quant import LayerQuant, QuantScheme
from moe_core.request import LayerRequest
from moe_core.weights.canonical import canonical_orientation


@attrs.frozen(kw_only=True)
class ExpertsLayout:
    """What one experts module computes; equal for modules that differ in their weights alone.

    Attributes:
        flags: As the module has them.
        num_experts: Experts whose weights the module holds (of this rank, if they are split).
        hidden_size: H.
        intermediate_size: I (of this rank, if it is split).
        dtype: Of the tokens: `fp32`, `bf16` or `fp16`.
        quant: Schemes of the weights.
        device_type: Where the weights lie.
        activation: Between the projections.
    """

    flags: Flags
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: str
    quant: LayerQuant
    device_type: str
    activation: ActivationSpec

    def request(self, top_k: int, **pins: Any) -> LayerRequest:
        """The layer as transformers calls it: ids are local, and whoever splits experts or rows reduces the output."""
        return LayerRequest(
            num_experts=self.num_experts,
            top_k=top_k,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            activation=self.activation,
            dtype=self.dtype,
            quant=self.quant,
            bias=self.flags.has_bias,
            post_norm=self.flags.has_post_expert_norm,
            **pins,
        )


def read_layout(
    module: torch.nn.Module, dtype: torch.dtype = torch.bfloat16, *, with_data: bool = True
) -> ExpertsLayout:
    """Read an experts module.

    Args:
        module: The module; left as it is.
        dtype: Of the tokens, where the weights do not tell it because they are quantized.
        with_data: Whether its parameters must have memory.

    Raises:
        UnsupportedModelError: Lists every trait that is not understood.
        InputError: Tokens of a dtype that no layer has.
    """
    flags = read_flags(module, with_data=with_data)
    tensors = local_parameters(module)
    down = tensors["down_proj"]
    turned = down.mT if flags.is_transposed else down
    if flags.fp8 is None:
        dtype = down.dtype
        quant = LayerQuant.of(QuantScheme.from_name(DTYPE_NAMES[dtype]))
    else:
        quant = read_quant(flags.fp8, tensors, flags.first_name, flags.halves)
        if dtype not in DTYPE_NAMES:
            known = ", ".join(str(known) for known in DTYPE_NAMES)
            raise InputError(f"{type(module).__qualname__}: tokens are {dtype}; expected one of {known}")
    hidden_size, intermediate_size = turned.shape[1], num_columns(turned, quant.w2.weight_dtype)
    return ExpertsLayout(
        flags=flags,
        num_experts=int(module.num_experts),  # type: ignore[arg-type]
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=DTYPE_NAMES[dtype],
        quant=quant,
        device_type=down.device.type,
        activation=_activation(module, flags, intermediate_size, down.device if with_data else None),
    )


def borrow_weights(module: torch.nn.Module, layout: ExpertsLayout) -> RawWeights:
    """Canonical views of the module's parameters; nothing is copied, and the module is not kept alive."""
    flags, tensors = layout.flags, local_parameters(module)
    orientation = "in_out" if flags.is_transposed else "out_in"
    raw = module_callables(module, layout)
    for name, stored in flags.weight_names.items():
        view = tensors[stored].detach()
        turned = canonical_orientation(view, orientation) if view.dim() == 3 else view
        raw.tensors[name] = canonical_view(name, turned, layout.quant)
    return raw


def module_callables(module: torch.nn.Module, layout: ExpertsLayout) -> RawWeights:
    """Weights without tensors yet, with the module's own gate and norm where the layout has them."""
    flags = layout.flags
    return RawWeights(
        tensors={},
        activation=_live(module, flags.gate_name) if layout.activation.kind == "module" else None,
        post_norm=_live(module, "post_expert_norm") if flags.has_post_expert_norm else None,
    )


def _live(module: torch.nn.Module, name: str) -> ActivationFn:
    """The module's own callable, looked up at each call; a bound method would keep the module alive for ever."""
    owner = weakref.ref(module)

    def call(rows: Tensor) -> Tensor:
        return getattr(owner(), name)(rows)  # type: ignore[no-any-return]

    return call


def _activation(
    module: torch.nn.Module, flags: Flags, intermediate_size: int, device: torch.device | None
) -> ActivationSpec:
    """A known activation if the module's gate is proven equal to one, else `kind="module"`: the gate itself."""
    row_order = "gate_up" if flags.is_concatenated or not flags.has_gate else "interleaved"
    act_fn = getattr(module, "act_fn", None)
    known = None
    # An activation with weights of its own may compute something else after they are written.
    if not (isinstance(act_fn, torch.nn.Module) and state_names(act_fn)):
        known = recognise(
            getattr(module, flags.gate_name),
            intermediate_size,
            gated=flags.has_gate,
            row_order=row_order,
            limits=_numbers(module, "limit"),
            alphas=_numbers(module, "alpha"),
            device=device,
        )
    return known or ActivationSpec(kind="module", gated=flags.has_gate, row_order=row_order)


def _numbers(module: torch.nn.Module, word: str) -> tuple[float, ...]:
    """Positive numbers among the module's attributes whose names contain `word`: where to look, not what to believe."""
    found = (value for name, value in vars(module).items() if word in name and isinstance(value, int | float))
    return tuple(sorted({float(value) for value in found if math.isfinite(value) and value > 0}))
