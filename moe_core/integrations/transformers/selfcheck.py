"""One comparison with the module's own forward: flags are a promise, and this is where a broken one shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from moe_core.errors import UnsupportedModelError
from moe_core.integrations.transformers.layout import ExpertsLayout
from moe_core.payloads import TORCH_DTYPES, Tensor

# Far above rounding (bf16 experts differ from each other by 1e-2 of the largest value, fp32 ones by 1e-5, and by 1e-3
# where matrix units round their inputs), far below what another formula does to these probe tokens.
_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 6e-2, torch.float16: 6e-2}


@torch.no_grad()
def check_against_eager(
    module: torch.nn.Module, experts: Callable[[Tensor, Tensor, Tensor], Tensor], layout: ExpertsLayout, top_k: int
) -> None:
    """Compare `experts` with the class's own forward on two tokens with `top_k` experts of unequal router weights.

    Nothing is concluded from weights that are not filled yet, that is, if the module's own result is not finite.

    Raises:
        UnsupportedModelError: The results differ by more than rounding.
    """
    parameters = list(module.parameters(recurse=False))
    if any(hasattr(parameter, "to_local") for parameter in parameters):
        # Split over ranks: the module's own forward runs only where transformers has set the parts in place.
        return
    hidden_states, topk_ids, topk_weights = _probe_tokens(layout, top_k, parameters[0].device)
    with torch.autocast(hidden_states.device.type, enabled=False):
        expected = inspect.unwrap(type(module).forward)(module, hidden_states, topk_ids, topk_weights).float()
        found = experts(hidden_states, topk_ids, topk_weights).float()
    largest, difference = float(expected.abs().max()), float((found - expected).abs().max())
    if largest < float("inf") and not difference <= _TOLERANCE[hidden_states.dtype] * largest:
        raise UnsupportedModelError(
            f"the forward of {type(module).__qualname__} of {type(module).__module__} computes something else than its "
            f"flags say: on two probe tokens the results differ by {difference:.2g}, the largest is {largest:.2g}; "
            "select another experts_implementation for this model"
        )


def _probe_tokens(layout: ExpertsLayout, top_k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    # Where a plan takes slots one by one (top_k 1), two of them show whether the weights are the router's.
    slots = top_k if top_k > 1 else min(2, layout.num_experts)
    hidden_states = torch.randn(2, layout.hidden_size, generator=torch.Generator().manual_seed(0))
    first = torch.arange(slots) * ((layout.num_experts - 1) // max(1, slots - 1) or 1)
    ids = torch.stack([first, layout.num_experts - 1 - first])
    weights = torch.stack([torch.linspace(0.9, 0.35, slots), torch.linspace(0.2, 0.6, slots)])
    dtype = TORCH_DTYPES[layout.dtype]
    return hidden_states.to(device, dtype), ids.to(device), weights.to(device, dtype)
