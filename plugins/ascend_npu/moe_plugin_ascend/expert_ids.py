"""What the operators want of ids and tokens, and the core does not promise."""

from __future__ import annotations

import torch

from moe_core.kernels.checks import check_ids
from moe_core.kernels.slots import EvenIds
from moe_core.payloads import Tensor
from moe_core.request import LayerRequest


def checked(topk_ids: Tensor, topk_weights: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Ids `[T, K]` int64 that are all in range or -1, and weights `[T, K]` fp32.

    Raises:
        InputError: On CPU, an id out of range. torch_npu has no assertion on the device (torch's waits for the host
            there), so that on a device the weights of the token become NaN instead, and its output with them.
    """
    if topk_ids.device.type == "cpu":
        check_ids(topk_ids, num_slots)
        return topk_ids.long(), topk_weights.float()
    return marked(topk_ids.long(), topk_weights.float(), num_slots)


def marked(ids: Tensor, weights: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Ids out of range become -1, and all weights of their tokens NaN; without waiting for the device.

    A token that would have no expert left is sent to the first one, since only a row can carry a NaN back.
    """
    is_wrong = (ids < -1) | (ids >= num_slots)
    has_wrong, ids = is_wrong.any(1, keepdim=True), torch.where(is_wrong, -1, ids)
    is_lost = has_wrong & (ids < 0).all(1, keepdim=True)
    ids = torch.cat([torch.where(is_lost, 0, ids[:, :1]), ids[:, 1:]], dim=1)
    return ids, torch.where(has_wrong, torch.nan, weights)


class LibraryIds:
    """Slots `[T, K]` and their weights -> the library's expert ids (`EvenIds`) and weights fp32."""

    def __init__(self, request: LayerRequest) -> None:
        """Look up the ranks' shares."""
        self._even, self._num_slots = EvenIds(request), request.num_slots

    def __call__(self, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """The ids, int64, -1 as it is, and the weights; errors as `checked`."""
        ids, weights = checked(topk_ids, topk_weights, self._num_slots)
        return self._even.of_checked(ids), weights


def at_least_one(hidden_states: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens as the library takes them: contiguous, and for a rank without tokens one token without experts.

    An empty tensor has no address, and a rank may not stay away from a collective.
    """
    if hidden_states.shape[0]:
        return hidden_states.contiguous(), ids.contiguous(), weights.contiguous()
    return (
        hidden_states.new_zeros((1, hidden_states.shape[1])),
        ids.new_full((1, ids.shape[1]), -1),
        weights.new_zeros((1, weights.shape[1])),
    )
