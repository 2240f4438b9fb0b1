from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.errors import SpecError
from moe_core.placement import ExpertPlacement
from moe_core.request import LayerRequest


def _request(**fields: Any) -> LayerRequest:
    return LayerRequest(**{"num_experts": 6, "top_k": 2, "hidden_size": 8, "intermediate_size": 8, **fields})


@given(st.integers(1, 300), st.integers(1, 64), st.sampled_from(["contiguous", "round_robin"]))
def test_every_expert_has_one_owner(num_experts: int, ep_size: int, kind: str) -> None:
    layer = _request(num_experts=num_experts, top_k=1, ep_size=ep_size, placement=ExpertPlacement(kind))
    owned = [layer.local_experts(rank) for rank in range(ep_size)]
    assert sorted(expert for experts in owned for expert in experts) == list(range(num_experts))
    assert [len(layer.local_slots(rank)) for rank in range(ep_size)] == list(map(len, owned))
    assert max(map(len, owned)) == layer.max_local_experts


def test_a_map_gives_each_rank_its_run_of_slots() -> None:
    layer = _request(ep_size=3, placement=ExpertPlacement("map", [3, 0, 1, 2, 3, 4, 5, 0]))
    assert [layer.local_experts(rank) for rank in range(3)] == [(3, 0, 1), (2, 3, 4), (5, 0)]
    assert [layer.local_slots(rank) for rank in range(3)] == [range(3), range(3, 6), range(6, 8)]
    assert (layer.num_slots, layer.max_local_experts) == (8, 3)
    assert layer.sizes(layer.workloads[0])["num_experts"] == 8


@pytest.mark.error_path
@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_group(rank: int) -> None:
    with pytest.raises(SpecError, match=f"rank {rank} is not in 0..3"):
        _request(ep_size=4).local_experts(rank)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (("contiguous", (0, 1)), "go with kind 'map' and with no other, got 'contiguous'"),
        (("map",), "go with kind 'map'"),
        (("map", (0, 1.5)), "experts"),
        (("diagonal",), "diagonal"),
    ],
)
def test_a_wrong_placement_says_so(fields: tuple[Any, ...], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        ExpertPlacement(*fields)


@pytest.mark.error_path
def test_a_map_must_hold_every_expert_and_no_other() -> None:
    with pytest.raises(SpecError, match=r"unknown \[6\], missing \[1, 4\]"):
        _request(placement=ExpertPlacement("map", [0, 2, 3, 5, 6]))
