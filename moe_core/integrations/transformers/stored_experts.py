"""Which experts modules of a model a checkpoint stores quantized, and what else it holds for the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs
import torch

from moe_core.errors import UnsupportedModelError, some_of
from moe_core.expert_names import is_of_experts, layer_index
from moe_core.integrations.transformers.layer_stack import LayerStack
from moe_core.integrations.transformers.layout import ExpertsLayout, read_layout
from moe_core.integrations.transformers.selfcheck import check_formula
from moe_core.integrations.transformers.traits import configured_top_k, is_experts, state_names
from moe_core.payloads import TORCH_DTYPES
from moe_core.quant import StoredLayer, read_layer
from moe_core.weights.names import choose_module, experts_modules


@attrs.frozen(eq=False, kw_only=True)
class StoredExperts:
    """One experts module whose weights are stored quantized.

    Attributes:
        name: Its name in the model.
        stored_as: Its name in the checkpoint.
        stored: How both projections are stored.
        layout: What it computes, with the schemes of the checkpoint.
        top_k: Experts per token, as the configuration says.
    """

    name: str
    stored_as: str
    stored: StoredLayer
    layout: ExpertsLayout
    top_k: int


def find_stored_experts(
    sketch: torch.nn.Module,
    names: Collection[str],
    quantization: Mapping[str, Any] | None,
    dtype: str,
    device: torch.device,
) -> list[StoredExperts]:
    """The experts modules that the checkpoint stores quantized.

    Args:
        sketch: The model without data.
        names: Names of the checkpoint's tensors.
        quantization: What says how they are stored.
        dtype: Word of the model's dtype.
        device: Where the experts will lie.

    Raises:
        UnsupportedModelError: A module has a trait that is not understood, or computes something else than it says.
        SpecError: The quantization is not understood.
        WeightsError: The checkpoint has no experts for a layer of the model.
    """
    if not quantization:
        return []
    found = []
    modules = experts_modules(names)
    checked: set[tuple[type, ExpertsLayout]] = set()
    for name, module in sketch.named_modules():
        if not is_experts(module):
            continue
        number = layer_index(name)
        if number is None:
            raise UnsupportedModelError(f"experts module {name}: expected one per numbered layer")
        layout = read_layout(module.to(TORCH_DTYPES[dtype]), with_data=False)
        stored_as = choose_module(modules, number)
        stored = read_layer(quantization, stored_as, dtype, gated=layout.flags.has_gate, num_experts=layout.num_experts)
        if not stored.quant.is_quantized:
            continue
        _refuse_state(name, module, layout)
        if (type(module), layout) not in checked:
            check_formula(module, layout)
            checked.add((type(module), layout))
        layout = attrs.evolve(layout, quant=stored.quant, device_type=device.type)
        found.append(
            StoredExperts(name=name, stored_as=stored_as, stored=stored, layout=layout, top_k=configured_top_k(module))
        )
    return found


def dense_names(names: Iterable[str], experts: Collection[StoredExperts], stack: LayerStack) -> list[str]:
    """Names outside the quantized experts and outside draft layers, which transformers' models do not have."""
    inside = tuple(f"{module.stored_as}." for module in experts)
    outside = (name for name in names if not (name.startswith(inside) and is_of_experts(name)))
    return sorted(name for name in outside if not stack.is_of_draft(name))


def _refuse_state(name: str, module: torch.nn.Module, layout: ExpertsLayout) -> None:
    """Weights inside the module besides the projections: nothing would load them."""
    state = [f"{child}.{key}" for child, inner in module.named_children() for key in state_names(inner)]
    if state or layout.flags.has_post_expert_norm:
        listed = some_of(state) or "post_expert_norm"
        raise UnsupportedModelError(
            f"experts module {name} has weights besides its projections ({listed}); quantized checkpoints of such "
            "models are not read"
        )
