"""What binding hands to dispatchers besides the plan: the calibrated scale of tokens, which ranks compare."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from fakes import CPU, NVFP4_TOKENS, dispatcher, fake_plugin, runner
from ranks import run_on_ranks

from moe_core import ExpertGroup
from moe_core.agreement import check_token_scale
from moe_core.bound import BoundExperts
from moe_core.errors import PluginError, WeightsError
from moe_core.manager import BackendManager
from moe_core.payloads import PreparedTensor, PreparedWeights
from moe_core.planner import make_plan
from moe_core.quant import NVFP4
from moe_core.request import LayerRequest

LAYER = LayerRequest(num_experts=2, top_k=1, hidden_size=32, intermediate_size=32, quant=NVFP4)
TOKENS = (torch.ones(3, 32, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def bound(weights: PreparedWeights) -> BoundExperts:
    """A layer whose experts give back what they get."""
    hooks: dict[str, Any] = {"fused_experts": lambda plan, route, weights: lambda tokens: tokens.hidden_states}
    manager = BackendManager()
    parts = (
        [dispatcher(sends=(NVFP4_TOKENS,), binder="calibrated_dispatch:bind")],
        [runner(reads=(NVFP4_TOKENS,), schemes=(NVFP4,))],
    )
    manager.register("toy", fake_plugin("toy", *parts, hooks))
    return BoundExperts(make_plan(manager, LAYER, CPU)[0], weights, manager)


def weights_with(scales: list[float]) -> PreparedWeights:
    tensors = {"x_scale": PreparedTensor(data=torch.tensor(scales))}
    return PreparedWeights(layout="canonical", tensors=tensors, token_scale="x_scale")


def test_a_dispatcher_rounds_with_the_scale_of_the_weights_and_sees_a_reload() -> None:
    weights = weights_with([2.0, 2.0])
    layer = bound(weights)
    assert (layer(*TOKENS) == 2).all()
    weights["x_scale"].fill_(3.0)
    assert (layer(*TOKENS) == 3).all()


@pytest.mark.error_path
def test_weights_that_name_no_scale_are_refused() -> None:
    with pytest.raises(PluginError, match=r"toy:toy.standard reads tokens as nvfp4/block_16.*these weights name none"):
        bound(attrs.evolve(weights_with([2.0]), token_scale=None))


def _told(group: ExpertGroup, cases: list[list[float]]) -> list[str]:
    """A rank's job: for each case, a scale for each rank, what it is told."""
    told = []
    for scales in cases:
        try:
            check_token_scale(torch.tensor(scales[group.rank]), group)
        except WeightsError as error:
            told.append(str(error))
        else:
            told.append("")
    return told


@pytest.mark.error_path
def test_every_rank_hears_of_scales_that_differ() -> None:
    cases = [[2.0, 2.0], [2.0, 3.0], [2.0, 0.0]]
    for found in run_on_ranks(_told, [(cases,)] * 2):
        same, apart, none = found
        if same:
            pytest.fail(same)
        for text, parts in (
            (apart, ["rank 0: 2, rank 1: 3", "load_experts"]),
            (none, ["rank 1: 0", "without experts"]),
        ):
            for part in parts:
                if part not in text:
                    pytest.fail(f"{part!r} is not in {text!r}")
