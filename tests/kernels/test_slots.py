from __future__ import annotations

import pytest
import torch

from moe_core import ExpertPlacement, LayerRequest
from moe_core.errors import InputError
from moe_core.kernels.slots import EvenIds, SlotMap, slot_map

#: Expert 0 in the slots 1 and 7, expert 3 in 0, 4 and 6.
_MAP = (3, 0, 1, 2, 3, 4, 3, 0, 5)


def _request(placement: ExpertPlacement, ep_size: int = 1) -> LayerRequest:
    return LayerRequest(
        num_experts=6, top_k=2, hidden_size=8, intermediate_size=8, ep_size=ep_size, placement=placement
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_token_goes_to_a_copy_of_its_expert(dtype: torch.dtype) -> None:
    ids = torch.randint(-1, 6, (64, 2), dtype=dtype, generator=torch.Generator().manual_seed(1))
    slots = SlotMap(_request(ExpertPlacement("map", _MAP), ep_size=2), None)(ids)
    assert slots.dtype == dtype
    back = torch.where(slots < 0, -1, torch.tensor(_MAP)[slots.long().clamp(min=0)])
    assert torch.equal(back, ids.long())


def test_copies_share_the_load() -> None:
    slots = SlotMap(_request(ExpertPlacement("map", _MAP)), None)(torch.full((30, 1), 3))
    assert torch.bincount(slots.flatten(), minlength=9).tolist() == [10, 0, 0, 0, 10, 0, 10, 0, 0]


def test_round_robin_counts_in_rank_order() -> None:
    # Rank 0 holds the experts 0, 2, 4 in the slots 0, 1, 2; rank 1 holds 1, 3, 5 in 3, 4, 5.
    slots = SlotMap(_request(ExpertPlacement("round_robin"), ep_size=2), None)(torch.tensor([[0, 1], [4, 5], [-1, 2]]))
    assert slots.tolist() == [[0, 3], [2, 5], [-1, 1]]


def test_no_map_where_slots_are_experts() -> None:
    assert slot_map(_request(ExpertPlacement(), ep_size=2), None) is None


@pytest.mark.error_path
def test_an_expert_that_does_not_exist_is_named() -> None:
    with pytest.raises(InputError, match="expert id 6 is out of range; num_experts is 6"):
        SlotMap(_request(ExpertPlacement("map", _MAP)), None)(torch.tensor([[6]]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_wrong_id_becomes_a_wrong_slot_for_the_dispatcher_to_find(dtype: torch.dtype) -> None:
    slots = SlotMap(_request(ExpertPlacement("map", _MAP)), None).unchecked(
        torch.tensor([[6, 0], [-2, 5], [100, -1]], dtype=dtype)
    )
    assert slots.dtype == dtype
    assert slots.tolist() == [[9, 7], [-2, 8], [9, -1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_library_that_divides_finds_the_rank_that_holds_an_expert(dtype: torch.dtype) -> None:
    request = _request(ExpertPlacement(), ep_size=4)
    even = EvenIds(request, None)
    ids = even(torch.tensor([[0, 1], [2, 3], [4, 5], [-1, 0]], dtype=dtype))
    assert even.num_experts == 8
    assert ids.dtype == torch.int64
    # Shares of 2, 2, 1 and 1 experts.
    assert ids.tolist() == [[0, 1], [2, 3], [4, 6], [-1, 0]]
    assert even.of_checked(torch.tensor([[5, -1], [3, 0]])).tolist() == [[6, -1], [3, 0]]
    for rank in range(4):
        for local, slot in enumerate(request.local_slots(rank)):
            (found,) = even(torch.tensor([[slot]])).flatten().tolist()
            assert divmod(found, even.num_experts // 4) == (rank, local)


def test_equal_shares_keep_their_ids() -> None:
    even = EvenIds(_request(ExpertPlacement(), ep_size=2), None)
    assert even.num_experts == 6
    assert even(torch.tensor([[5, -1]], dtype=torch.int32)).tolist() == [[5, -1]]


@pytest.mark.error_path
def test_a_slot_out_of_range_is_refused() -> None:
    even = EvenIds(_request(ExpertPlacement(), ep_size=4), None)
    with pytest.raises(InputError, match="expert id 6 is out of range"):
        even(torch.tensor([[6, 0]]))
    with pytest.raises(InputError, match="expected int32 or int64"):
        even(torch.tensor([[1.0, 0.0]]))
