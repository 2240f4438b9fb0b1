"""Expert ids to the slots that hold them."""

from __future__ import annotations

import torch

from moe_core.kernels import ops
from moe_core.kernels.checks import check_id_dtype, check_ids, renumbered
from moe_core.payloads import Tensor
from moe_core.request import LayerRequest


class SlotMap:
    """Global expert ids `[T, K]` -> slots `[T, K]` of the same dtype, -1 stays.

    Which copy of an expert a token uses follows from the token's place in the batch and in its row alone: ranks that
    see the same tokens agree without speaking, and the copies share the load. Neither waits for the device.
    """

    def __init__(self, request: LayerRequest, device: torch.device | None) -> None:
        """Tabulate the slots of each expert on the device where ids will come, None for the CPU."""
        slots: list[list[int]] = [[] for _ in range(request.num_experts)]
        for rank in range(request.ep_size):
            for slot, expert in zip(request.local_slots(rank), request.local_experts(rank), strict=True):
                slots[expert].append(slot)
        most = max(map(len, slots))
        self._num_experts, self._num_slots = request.num_experts, request.num_slots
        self._num_copies = torch.tensor([len(copies) for copies in slots], device=device)
        self._slots = torch.tensor([copies + copies[:1] * (most - len(copies)) for copies in slots], device=device)

    def __call__(self, topk_ids: Tensor) -> Tensor:
        """The slots.

        Raises:
            InputError: Ids of another dtype, or on CPU one out of range; elsewhere the dispatcher finds it, so that no
                device looks twice.
        """
        if topk_ids.device.type == "cpu":
            check_ids(topk_ids, self._num_experts)
        else:
            check_id_dtype(topk_ids)
        return self.unchecked(topk_ids)

    def unchecked(self, topk_ids: Tensor) -> Tensor:
        """The slots `[T, K]`; what is no expert becomes no slot: negative ids stay, larger ones become `num_slots`."""
        is_expert = (topk_ids >= 0) & (topk_ids < self._num_experts)
        expert = torch.where(is_expert, topk_ids, 0).long()
        tokens, places = (torch.arange(size, device=topk_ids.device) for size in topk_ids.shape)
        copy = (tokens[:, None] + places) % self._num_copies[expert]
        none = torch.where(topk_ids < 0, topk_ids, self._num_slots)
        return torch.where(is_expert, self._slots[expert, copy], none).to(topk_ids.dtype)


def slot_map(request: LayerRequest, device: torch.device | None) -> SlotMap | None:
    """The map of a layer, or None where slots are experts."""
    return None if request.placement.kind == "contiguous" else SlotMap(request, device)


class EvenIds:
    """Slots `[T, K]` -> int64 ids of a library that finds an expert's rank by division, -1 as it is.

    Such a library wants as many experts on every rank. Where the core's shares differ, the smaller ones are filled up
    with experts that no token names.

    Attributes:
        num_experts: The library's experts.
    """

    def __init__(self, request: LayerRequest, device: torch.device | None) -> None:
        """Look up the ranks' shares; `device` is where slots will come (`ExpertGroup.device`)."""
        most, shares = request.max_local_experts, [len(request.local_slots(rank)) for rank in range(request.ep_size)]
        ids = [rank * most + local for rank, share in enumerate(shares) for local in range(share)]
        self.num_experts = most * request.ep_size
        self._num_slots = request.num_slots
        self._table = None if ids == list(range(self._num_slots)) else torch.tensor(ids, device=device)

    def __call__(self, topk_ids: Tensor) -> Tensor:
        """The ids, contiguous; raises `InputError` for slots out of range, as `checks.check_ids`."""
        return ops.checked_ids(topk_ids, self._num_slots, self._table)

    def of_checked(self, slots: Tensor) -> Tensor:
        """The ids of int64 slots `[T, K]` in range or -1, for who has looked by other means than the core's."""
        return renumbered(slots, self._table)
