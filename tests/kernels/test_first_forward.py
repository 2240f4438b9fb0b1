"""The first forward of a layer finds everything on its device: it brings no table there, and waits for none."""

from __future__ import annotations

import pytest
import torch
from layers import random_tensors, torch_manager
from without_data import DEVICE, NothingOfTheHost

from moe_core import ExpertGroup, ExpertPlacement, LayerRequest, RawWeights, make_plan
from moe_core.backends.torch.weights import prepare
from moe_core.bound import BoundExperts
from moe_core.environment import load_environment
from moe_core.kernels.slots import EvenIds
from moe_core.payloads import Tensor

#: Five experts on two ranks, and eight slots for them; expert 0 has two copies and expert 3 three.
_PLACEMENTS = {
    "uneven": ExpertPlacement(),
    "round_robin": ExpertPlacement("round_robin"),
    "copies": ExpertPlacement("map", (3, 0, 1, 2, 3, 4, 3, 0)),
}


def _layer(request: LayerRequest, rank: int) -> BoundExperts:
    group = ExpertGroup(rank=rank, size=request.ep_size)
    plan, _ = make_plan(torch_manager(), request, load_environment("h100"))
    own = list(request.local_experts(rank))
    raw = RawWeights(tensors={name: tensor[own].to(DEVICE) for name, tensor in random_tensors(request).items()})
    return BoundExperts(plan, prepare(plan, raw, None), torch_manager(), group)


def _ids(dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(7, 2, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("mode", ["standard", "contiguous", "masked"])
@pytest.mark.parametrize("placement", _PLACEMENTS.values(), ids=list(_PLACEMENTS))
def test_the_first_forward_of_a_rank_brings_nothing_along(placement: ExpertPlacement, mode: str) -> None:
    request = LayerRequest(
        num_experts=5,
        top_k=2,
        hidden_size=64,
        intermediate_size=48,
        ep_size=2,
        token_placement="replicated",
        placement=placement,
        a2a_backend=f"none.{mode}",
    )
    for rank in range(2):
        layer = _layer(request, rank)
        x, weights = torch.empty(7, 64, dtype=torch.bfloat16, device=DEVICE), torch.empty(7, 2, device=DEVICE)
        with NothingOfTheHost():
            # What comes before it asks for autocast, which this device does not have.
            output = layer._run(x, _ids(), weights, None, None)
        assert output.device == DEVICE


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_a_library_are_where_they_are_needed(dtype: torch.dtype) -> None:
    request = LayerRequest(num_experts=5, top_k=2, hidden_size=64, intermediate_size=48, ep_size=2)
    even = EvenIds(request, DEVICE)
    with NothingOfTheHost():
        for ids in (even(_ids(dtype)), even.of_checked(_ids())):
            assert (ids.device, ids.dtype) == (DEVICE, torch.int64)
