"""What the operators want of ids and tokens, and the core does not promise."""

from __future__ import annotations

import torch

from moe_core.kernels.checks import checked_slots
from moe_core.kernels.slots import EvenIds
from moe_core.payloads import Tensor
from moe_core.request import LayerRequest


class LibraryIds:
    """Slots `[T, K]` and their weights -> the library's expert ids (`EvenIds`) and weights fp32.

    Attributes:
        num_experts: The library's experts, as many on every rank.
    """

    def __init__(self, request: LayerRequest, device: torch.device | None) -> None:
        """Look up the ranks' shares; `device` is where slots will come (`ExpertGroup.device`)."""
        self._even, self._num_slots = EvenIds(request, device), request.num_slots
        self.num_experts = self._even.num_experts

    def __call__(self, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """The ids, int64, -1 as it is, with weight zero; slots out of range are as in `checks.checked_slots`."""
        ids, weights = checked_slots(topk_ids, topk_weights, self._num_slots)
        # A router may have left anything in the weight of a slot without expert.
        return self._even.of_checked(ids.long()), torch.where(ids < 0, 0.0, weights.float())


def at_least_one(hidden_states: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens as the library takes them: contiguous, and for a rank without tokens one token without experts.

    An empty tensor has no address, and a rank may not stay away from a collective.

    Args:
        hidden_states: `[T, H]`.
        ids: `[T, K]` int64.
        weights: `[T, K]` fp32.
    """
    if hidden_states.shape[0]:
        return hidden_states.contiguous(), ids.contiguous(), weights.contiguous()
    return (
        hidden_states.new_zeros((1, hidden_states.shape[1])),
        ids.new_full((1, ids.shape[1]), -1),
        weights.new_zeros((1, weights.shape[1])),
    )
