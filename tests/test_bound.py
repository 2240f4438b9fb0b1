"""What binding hands to dispatchers besides the plan: the calibrated scale of tokens, which ranks compare."""

from __future__ import annotations

import unittest.mock
from typing import Any

import attrs
import pytest
import torch
from fakes import CPU, NVFP4_TOKENS, dispatcher, fake_plugin, runner
from ranks import RankError, run_on_ranks

from moe_core import ExpertGroup, MoELayer
from moe_core.agreement import check_token_scale
from moe_core.bound import BoundExperts
from moe_core.errors import InputError, PlanMismatchError, PluginError, WeightsError
from moe_core.manager import BackendManager
from moe_core.payloads import PreparedTensor, PreparedWeights, RawWeights
from moe_core.plan import MoEPlan
from moe_core.planner import make_plan
from moe_core.quant import NVFP4
from moe_core.request import LayerRequest
from moe_core.testing.stored import draw_layer

LAYER = LayerRequest(num_experts=2, top_k=1, hidden_size=32, intermediate_size=32, quant=NVFP4)
TOKENS = (torch.ones(3, 32, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def prepare(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """The input scales of the first projection, and nothing else."""
    scales = weights.tensors["w13_input_scale"]
    if out is None:
        return PreparedWeights(
            layout="canonical", tensors={"x_scale": PreparedTensor(data=scales.clone())}, token_scale="x_scale"
        )
    out["x_scale"].copy_(scales)
    return out


def toy(told: list[ExpertGroup] | None = None) -> BackendManager:
    """A plugin whose experts give back what they get; `told` collects the groups that they are bound with."""

    def fused_experts(plan: MoEPlan, route: Any, weights: PreparedWeights, group: ExpertGroup) -> Any:
        if told is not None:
            told.append(group)
        return lambda tokens: tokens.hidden_states

    hooks: dict[str, Any] = {"process_weights_after_loading": prepare, "fused_experts": fused_experts}
    manager = BackendManager()
    sends = {"sends": (NVFP4_TOKENS,), "binder": "calibrated_dispatch:bind", "token_placements": ("replicated",)}
    parts = [dispatcher(**sends)], [runner(reads=(NVFP4_TOKENS,), schemes=(NVFP4,))]
    manager.register("toy", fake_plugin("toy", *parts, hooks))
    return manager


def bound(weights: PreparedWeights) -> BoundExperts:
    manager = toy()
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


class _OwnGroup(ExpertGroup):
    """Cannot be made anew with another device."""

    def __init__(self, name: str) -> None:
        super().__init__()


@pytest.mark.error_path
@pytest.mark.parametrize("group", [_OwnGroup("mine"), "world"], ids=["subclass", "text"])
def test_a_group_that_cannot_be_told_the_device_is_refused(group: Any) -> None:
    manager = toy()
    with pytest.raises(InputError, match=f"expected an ExpertGroup .* got {type(group).__name__}"):
        BoundExperts(make_plan(manager, LAYER, CPU)[0], weights_with([0.5, 0.5]), manager, group)


@attrs.frozen
class _NamedGroup(ExpertGroup):
    name: str = "mine"


def test_a_group_of_the_users_own_class_is_told_the_device() -> None:
    told: list[ExpertGroup] = []
    manager = toy(told)
    BoundExperts(make_plan(manager, LAYER, CPU)[0], weights_with([0.5, 0.5]), manager, _NamedGroup())
    assert told == [_NamedGroup(device=torch.device("cpu"))]


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


def _reloaded(group: ExpertGroup, scales: list[float]) -> tuple[str, float]:
    """A rank's job: load equal scales, then this rank's of `scales`; what it is told, and what it rounds with then."""
    request = attrs.evolve(LAYER, ep_size=group.size, token_placement="replicated")
    layer = MoELayer(request, environment=CPU, manager=toy(), group=group)
    for scale in (2.0, scales[group.rank]):
        raw = draw_layer(LAYER).raw(layer.local_experts, "cpu")
        raw.tensors["w13_input_scale"].fill_(scale)
        try:
            layer.load_weights(raw)
        except WeightsError as error:
            return str(error), float(layer.x_scale[0])
    return "", float(layer.x_scale[0])


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("scales", "text", "left"),
    [
        pytest.param([3.0, 3.0], "", 3.0, id="equal"),
        pytest.param([3.0, 4.0], "different scales (rank 0: 3, rank 1: 4)", 2.0, id="apart"),
    ],
)
def test_ranks_compare_the_scales_of_a_reload_before_they_write_it(scales: list[float], text: str, left: float) -> None:
    for found in run_on_ranks(_reloaded, [(scales,)] * 2):
        told, kept = found
        assert text in told
        assert bool(told) == bool(text)
        assert kept == left


def _refusing(group: ExpertGroup, refusals: int, loads: int) -> list[tuple[str, float | None]]:
    """A rank's job: some loads, of which the last but one is wrong on rank 1; what each tells, and the scale then."""
    request = attrs.evolve(LAYER, ep_size=group.size, token_placement="replicated")
    layer = MoELayer(request, environment=CPU, manager=toy(), group=group)
    told: list[tuple[str, float | None]] = []
    for load in range(loads):
        raw = draw_layer(LAYER).raw(layer.local_experts, "cpu")
        raw.tensors["w13_input_scale"].fill_(2.0 + load)
        if load == refusals and group.rank == 1:
            raw.tensors["w13"] = raw.tensors["w13"][:, :-1]
        try:
            layer.load_weights(raw)
            text = ""
        except (WeightsError, PlanMismatchError) as error:
            text = str(error)
        told.append((text, float(layer.x_scale[0]) if hasattr(layer, "x_scale") else None))
    return told


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("wrong", "stands", "before"),
    [
        pytest.param(0, "no rank has loaded this layer", [], id="first load"),
        pytest.param(1, "nothing was written on any rank", [2.0], id="reload"),
    ],
)
def test_ranks_hear_of_one_that_refuses_its_weights_and_load_again(
    wrong: int, stands: str, before: list[float]
) -> None:
    other, refusing = run_on_ranks(_refusing, [(wrong, wrong + 2)] * 2)
    for found, parts in ((other, ["rank 1 refused its weights", stands]), (refusing, ["do not fit", "w13: expected"])):
        assert not isinstance(found, RankError), found.text
        text, kept = found[wrong]
        assert all(part in text for part in parts), text
        assert kept == (before[-1] if before else None)
        assert found[-1] == ("", 3.0 + wrong)


def _refused(group: ExpertGroup, request: LayerRequest) -> list[str]:
    """A rank's job: load, then reload weights that are wrong on rank 1; what it is told."""
    layer = MoELayer(request, device="cpu", group=group)
    told = []
    for wrong in (False, group.rank == 1):
        raw = draw_layer(request).raw(layer.local_experts, "cpu")
        if wrong:
            raw.tensors["w13"] = raw.tensors["w13"][:, :-1]
        try:
            with unittest.mock.patch.object(torch.distributed, "all_gather", wraps=torch.distributed.all_gather) as spy:
                layer.load_weights(raw)
        except WeightsError as error:
            told.append(str(error))
        told.append(str(spy.call_count))
    return told


@pytest.mark.error_path
def test_a_reload_without_scales_of_tokens_is_each_ranks_own() -> None:
    request = LayerRequest(num_experts=2, top_k=1, hidden_size=32, intermediate_size=32, ep_size=2)
    first, (loaded, refusal, reloaded) = run_on_ranks(_refused, [(request,)] * 2)
    assert first == ["1", "0"]
    assert "w13: expected" in refusal
    assert (loaded, reloaded) == ("1", "0")
