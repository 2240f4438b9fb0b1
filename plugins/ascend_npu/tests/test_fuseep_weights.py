"""The weights of the fused call: bit for bit, in the vendor's order, in tiles, and again after a reload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend_layers import A3, manager, small
from moe_plugin_ascend.emulation.formats import note_of, values
from moe_plugin_ascend.fuseep_weights import in_turns

from moe_core import ExpertGroup, LayerRequest, RawWeights
from moe_core.errors import PluginError
from moe_core.payloads import PreparedWeights
from moe_core.plan import MoEPlan
from moe_core.planner import make_plan
from moe_core.quant import W8A8_INT8
from moe_core.testing.examples import stored_layer

H, I = 1024, 576  # noqa: E741 - the letters of the shapes


def request(mode: int, **fields: Any) -> LayerRequest:
    return small(
        quant=W8A8_INT8,
        hidden_size=H,
        intermediate_size=I,
        a2a_backend="ascend_fuseep",
        runner_backend=f"fuseep.mode{mode}",
        **fields,
    )


def prepared(mode: int, out: PreparedWeights | None = None, seed: int = 0) -> tuple[MoEPlan, RawWeights, Any]:
    plan, _ = make_plan(manager(), request(mode), A3)
    raw = stored_layer(request(mode), seed).raw((0, 1, 2), "cpu")
    kept = {name: tensor.clone() for name, tensor in raw.tensors.items()}
    made = manager().process_weights(plan, raw, out)
    assert all(torch.equal(raw.tensors[name], tensor) for name, tensor in kept.items())
    return plan, raw, made


def test_turns_by_their_definition() -> None:
    rows = torch.arange(2 * I)
    turned = in_turns(rows)
    for place, row in enumerate(turned.tolist()):
        turn, inside = divmod(place, 128)
        assert row == (turn * 64 + inside if inside < 64 else I + turn * 64 + inside - 64)
    matrix = torch.randn(2 * I, 3)
    assert torch.equal(in_turns(matrix), matrix[turned])


def test_mode_1() -> None:
    _, raw, made = prepared(1)
    assert made.layout == "ascend_fuseep_1"
    w13, turns = values(made["w13"]), in_turns(torch.arange(2 * I))
    for expert in range(3):
        for column in (0, 63, 64, 127, 128, 2 * I - 1):
            row = int(turns[column])
            assert torch.equal(w13[expert, :, column], raw.tensors["w13"][expert, row])
            assert made["w13_scale"][expert, column] == raw.tensors["w13_scale"][expert, row]
    assert torch.equal(values(made["w2"]), raw.tensors["w2"])
    assert torch.equal(made["w2_scale"], raw.tensors["w2_scale"].float())
    assert made["w13_scale"].dtype == made["w2_scale"].dtype == torch.float32


def test_mode_2() -> None:
    _, raw, made = prepared(2)
    assert made.layout == "ascend_fuseep_2"
    for name in ("w13", "w2"):
        assert torch.equal(values(made[name]), raw.tensors[name].mT)
        scale = made[f"{name}_scale"]
        assert scale.dtype == torch.int64
        assert ((scale >> 32) == 0).all()
        # The operator reads all experts' scales as one row of fp32 words, one in two.
        words = scale.view(-1).view(torch.float32)[::2]
        assert torch.equal(words, raw.tensors[f"{name}_scale"].float().reshape(-1))


@pytest.mark.parametrize("mode", [1, 2])
def test_a_reload_fills_the_same_memory_with_what_a_fresh_load_gives(mode: int) -> None:
    _, _, made = prepared(mode)
    before = {name: tensor.data.data_ptr() for name, tensor in made.tensors.items()}
    _, _, again = prepared(mode, out=made, seed=1)
    _, _, fresh = prepared(mode, seed=1)
    assert again is made
    assert {name: tensor.data.data_ptr() for name, tensor in made.tensors.items()} == before
    for name, tensor in fresh.tensors.items():
        assert torch.equal(made[name].view(-1), tensor.data.view(-1)), name
        assert tensor.expert_axis == 0
        assert (note_of(tensor.data) is not None) == (not name.endswith("scale")), "weights are in tiles"


def test_a_rank_with_fewer_experts_has_memory_for_as_many() -> None:
    plan, _ = make_plan(manager(), request(1), A3)
    made = manager().process_weights(plan, stored_layer(request(1)).raw((3, 4), "cpu"), None)
    assert {tensor.data.shape[0] for tensor in made.tensors.values()} == {3}


@pytest.mark.error_path
@pytest.mark.parametrize(("mode", "other"), [(1, 2), (2, 1)])
def test_one_mode_refuses_the_weights_of_the_other(mode: int, other: int) -> None:
    _, _, made = prepared(mode)
    plan, _ = make_plan(manager(), request(other), A3)
    wanted = f"reads weight layout 'ascend_fuseep_{other}', these weights are 'ascend_fuseep_{mode}'"
    with pytest.raises(PluginError, match=wanted):
        manager().bind_experts(plan, plan.routes[0], made, ExpertGroup(size=2))


@pytest.mark.error_path
@pytest.mark.parametrize(("mode", "other"), [(1, 2), (2, 1)])
def test_one_mode_does_not_refill_the_weights_of_the_other(mode: int, other: int) -> None:
    _, raw, made = prepared(mode)
    before = {name: tensor.data.clone() for name, tensor in made.tensors.items()}
    plan, _ = make_plan(manager(), request(other), A3)
    wanted = f"layout 'ascend_fuseep_{other}' cannot refill weights in 'ascend_fuseep_{mode}'; nothing was written"
    with pytest.raises(PluginError, match=wanted):
        manager().process_weights(plan, raw, made)
    if not all(torch.equal(made[name], tensor) for name, tensor in before.items()):
        raise AssertionError("something was written")
