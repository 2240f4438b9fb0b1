"""One layer from request to result: loading, reloading, refusing, explaining, moving, compiling."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import attrs
import pytest
import torch
from layers import build, exact, random_tensors, random_tokens, torch_manager
from reference_moe import rel

from moe_core import Environment, ExpertGroup, LayerRequest, MoELayer, RawWeights, Workload
from moe_core.activation import ActivationSpec
from moe_core.backends.torch import local
from moe_core.errors import InputError, PluginError, ResolutionError, WeightsError
from moe_core.layer import _device_of
from moe_core.payloads import PreparedTensor, PreparedWeights
from moe_core.plan import MoEPlan, Route
from moe_core.quant import NVFP4, W8A8_INT8

SMALL = LayerRequest(num_experts=5, top_k=2, hidden_size=32, intermediate_size=24, dtype="fp32", bias=True)
CPU = Environment(device_type="cpu", packages={"torch": torch.__version__})


@pytest.fixture
def layer() -> MoELayer:
    return build(SMALL, random_tensors(SMALL))


def test_loading_again_gives_what_a_fresh_load_gives_in_the_same_storage(layer: MoELayer) -> None:
    tokens = random_tokens(SMALL, 6)
    places = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    for seed in (3, 0, 0):
        tensors = random_tensors(SMALL, seed)
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        layer.load_weights(RawWeights(tensors=tensors))
        assert torch.equal(layer(*tokens), build(SMALL, tensors)(*tokens))
        assert rel(layer(*tokens).double(), exact(SMALL, tensors, tokens)) < 2e-6
        assert all(torch.equal(tensors[name], kept[name]) for name in tensors)
    assert places == {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}


def test_weights_of_an_emulated_machine_lie_where_they_are() -> None:
    npu = Environment(device_type="npu", arch="a3", packages={"torch": torch.__version__})
    layer = MoELayer(SMALL, environment=npu, manager=torch_manager())
    with pytest.raises(WeightsError, match="expected RawWeights"):
        layer.load_weights({})  # type: ignore[arg-type]
    layer.load_weights(RawWeights(tensors=random_tensors(SMALL)))
    assert {parameter.device.type for parameter in layer.parameters()} == {"cpu"}
    # A rank tells the others of what it refuses where its weights lie, whatever machine is described.
    weights = RawWeights(tensors=random_tensors(SMALL))
    assert [_device_of(weights, kind).type for kind in ("npu", "cuda", "cpu")] == ["cpu"] * 3
    assert _device_of({}, "cuda").type == "cuda"


def test_a_reload_brings_its_callables() -> None:
    request = attrs.evolve(SMALL, activation=ActivationSpec(kind="module", gated=False), post_norm=True)
    tensors, tokens = random_tensors(request), random_tokens(request, 6)
    layer = MoELayer(request, environment=CPU, manager=torch_manager())
    outputs = []
    for activation, post_norm in ((torch.tanh, torch.sin), (torch.relu, torch.sin), (torch.relu, torch.cos)):
        weights = RawWeights(tensors=tensors, activation=activation, post_norm=post_norm)
        layer.load_weights(weights)
        fresh = MoELayer(request, environment=CPU, manager=torch_manager())
        fresh.load_weights(weights)
        outputs.append(layer(*tokens))
        assert torch.equal(outputs[-1], fresh(*tokens))
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:])
    assert not torch.equal(outputs[1], outputs[2])


def test_tensors_that_are_handed_over_are_not_copied() -> None:
    tensors = random_tensors(SMALL)
    layer = MoELayer(SMALL, environment=CPU, manager=torch_manager())
    layer.load_weights(RawWeights(tensors=tensors, handed_over=True))
    assert {n: p.data_ptr() for n, p in layer.named_parameters()} == {n: t.data_ptr() for n, t in tensors.items()}


def test_each_expert_is_given_back_once_it_is_copied() -> None:
    tensors, released = random_tensors(SMALL), list[int]()

    def release(expert: int) -> None:
        released.append(expert)
        for tensor in tensors.values():
            tensor[expert] = torch.nan

    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    layer = MoELayer(SMALL, environment=CPU, manager=torch_manager())
    for _ in ("load", "reload"):
        for name, tensor in tensors.items():
            tensor.copy_(kept[name])
        layer.load_weights(RawWeights(tensors=tensors, release=release))
        assert released == list(range(5))
        assert all(torch.equal(parameter, kept[name]) for name, parameter in layer.named_parameters())
        released.clear()


def test_an_expert_that_the_preparation_gave_back_is_not_given_back_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, released = torch_manager(), list[int]()

    def copying(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
        copies = {name: PreparedTensor(data=tensor.clone()) for name, tensor in weights.tensors.items()}
        for expert in range(5):
            weights.release(expert)  # type: ignore[misc]
        return PreparedWeights(layout=plan.weight_layout, tensors=copies)

    monkeypatch.setattr(manager, "process_weights", copying)
    layer = MoELayer(SMALL, environment=CPU, manager=manager)
    layer.load_weights(RawWeights(tensors=random_tensors(SMALL), release=released.append))
    assert released == list(range(5))


def test_two_layers_do_not_disturb_each_other(layer: MoELayer) -> None:
    tokens = random_tokens(SMALL, 6)
    before = layer(*tokens)
    other = build(attrs.evolve(SMALL, a2a_backend="none.masked"), random_tensors(SMALL, 9))
    other(*tokens)
    assert torch.equal(layer(*tokens), before)
    del other
    assert torch.equal(layer(*tokens), before)


def test_explain_names_the_choice_and_the_rest(layer: MoELayer) -> None:
    text = layer.explain()
    assert "torch:none.standard + torch:torch.standard" in text
    assert "torch:torch_alltoall.contiguous, .masked, .standard: limit: needs ep_size >= 2" in text
    assert "torch:torch_alltoall.standard: no" in layer.explain(full=True)
    assert "weights: canonical" in text
    assert "torch:none.standard" in repr(layer)


def test_it_compiles_without_a_graph_break(layer: MoELayer) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        tokens = random_tokens(SMALL, 6, seed)
        want = exact(SMALL, random_tensors(SMALL), tokens)
        assert rel(compiled(*tokens).double(), want) < 2e-6


@pytest.mark.parametrize("compiled", [False, True])
def test_routes_of_a_local_plan_follow_the_token_count(compiled: bool) -> None:
    workloads = [Workload(max_tokens=4, a2a_backend="none.masked"), Workload(max_tokens=9, a2a_backend="none.standard")]
    tensors = random_tensors(SMALL)
    layer = build(attrs.evolve(SMALL, workloads=workloads), tensors)
    assert [route.runner.spec.format for route in layer.plan.routes] == ["masked", "standard"]
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for count in (4, 5, 9):
        tokens = random_tokens(SMALL, count)
        assert rel(run(*tokens).double(), exact(SMALL, tensors, tokens)) < 2e-6


def test_there_is_no_gradient_and_the_backward_says_so(layer: MoELayer) -> None:
    hidden_states, topk_ids, topk_weights = random_tokens(SMALL, 3)
    output = layer(hidden_states.requires_grad_(), topk_ids, topk_weights)
    assert torch.equal(output.detach(), layer(hidden_states.detach(), topk_ids, topk_weights))
    with pytest.raises(InputError, match="inference only"):
        output.sum().backward()


def test_overlap_runs_between_dispatch_and_combine(layer: MoELayer) -> None:
    calls: list[str] = []
    layer(*random_tokens(SMALL, 3), overlap=lambda: calls.append("shared expert"))
    assert calls == ["shared expert"]


def test_overlap_runs_while_tokens_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    bind = local.bind_standard

    def bind_later(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[Any, Any, Any]:
        dispatch, combine = bind(plan, route, group)

        def send(*tokens: torch.Tensor) -> tuple[Any, Any]:
            calls.append("send")
            dispatched, handle = dispatch(*tokens)
            return lambda: (calls.append("receive"), dispatched)[1], handle

        return dispatch, combine, send

    monkeypatch.setattr(local, "bind_standard", bind_later)
    layer = build(SMALL, random_tensors(SMALL))
    tokens = random_tokens(SMALL, 3)
    alone = layer(*tokens)
    assert calls == []
    assert torch.equal(layer(*tokens, overlap=lambda: calls.append("shared expert")), alone)
    assert calls == ["send", "shared expert", "receive"]


def test_moving_to_where_it_is_changes_nothing(layer: MoELayer) -> None:
    assert layer.to("cpu").float() is layer


def test_an_int8_layer_reloads_with_its_scales() -> None:
    request = LayerRequest(num_experts=3, top_k=2, hidden_size=32, intermediate_size=16, quant=W8A8_INT8)
    tokens = random_tokens(request, 4)
    first, second = _int8_tensors(request, 1), _int8_tensors(request, 2)
    layer = build(request, first)
    before = layer(*tokens)
    layer.load_weights(RawWeights(tensors=second))
    assert torch.equal(layer(*tokens), build(request, second)(*tokens))
    layer.load_weights(RawWeights(tensors=first))
    assert torch.equal(layer(*tokens), before)


def _int8_tensors(request: LayerRequest, seed: int) -> dict[str, torch.Tensor]:
    floats = random_tensors(request, seed)
    tensors = {}
    for name, tensor in floats.items():
        scale = tensor.float().abs().amax(-1) / 127
        tensors |= {name: (tensor.float() / scale[..., None]).round().to(torch.int8), f"{name}_scale": scale}
    return tensors


# ---- refusals --------------------------------------------------------------------------------------------------
def _broken(change: str) -> dict[str, torch.Tensor]:
    tensors = random_tensors(SMALL)
    if change == "missing":
        del tensors["w2"]
    elif change == "unknown":
        tensors["w4"] = tensors["w2"]
    elif change == "misshapen":
        tensors["w13"] = tensors["w13"][:, :-1]
    elif change == "one expert short":
        tensors = {name: tensor[:-1] for name, tensor in tensors.items()}
    else:
        tensors["w13"] = tensors["w13"].bfloat16()
    return tensors


_COMPLAINTS = {
    "missing": r"w2: missing, expected \[5, 32, 24\]",
    "unknown": r"w4: unknown; this layer has w13, w2, b13, b2",
    "misshapen": r"w13: expected \[5, 48, 32\] float32, got \[5, 47, 32\] float32",
    "one expert short": r"(?s)w13: expected \[5, .*b2: expected \[5, 32\]",
    "mistyped": r"w13: expected \[5, 48, 32\] float32, got \[5, 48, 32\] bfloat16",
}


@pytest.mark.error_path
@pytest.mark.parametrize("change", _COMPLAINTS)
def test_a_bad_load_is_refused_and_changes_nothing(change: str, layer: MoELayer) -> None:
    fresh = MoELayer(SMALL, environment=CPU, manager=torch_manager())
    with pytest.raises(WeightsError, match=_COMPLAINTS[change]):
        fresh.load_weights(RawWeights(tensors=_broken(change)))
    with pytest.raises(WeightsError, match="no weights yet"):
        fresh(*random_tokens(SMALL, 2))
    tokens = random_tokens(SMALL, 2)
    before = layer(*tokens)
    with pytest.raises(WeightsError, match="nothing was loaded"):
        layer.load_weights(RawWeights(tensors=_broken(change)))
    assert torch.equal(layer(*tokens), before)


@pytest.mark.error_path
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_calibrated_scale_must_be_a_positive_number(value: float) -> None:
    request = LayerRequest(num_experts=2, top_k=1, hidden_size=32, intermediate_size=16, quant=NVFP4)
    layer = MoELayer(request, environment=CPU, manager=torch_manager())
    e4m3 = torch.float8_e4m3fn
    tensors = {
        "w13": torch.zeros(2, 32, 16, dtype=torch.uint8),
        "w13_scale": torch.ones(2, 32, 2).to(e4m3),
        "w13_global_scale": torch.ones(2, 2),
        "w13_input_scale": torch.tensor([1.0, value]),
        "w2": torch.zeros(2, 32, 8, dtype=torch.uint8),
        "w2_scale": torch.ones(2, 32, 1).to(e4m3),
        "w2_global_scale": torch.ones(2),
        "w2_input_scale": torch.ones(2),
    }
    with pytest.raises(WeightsError, match=r"w13_input_scale: zero, negative or not finite for local experts \[1\]"):
        layer.load_weights(RawWeights(tensors=tensors))


def _wrong_tokens() -> dict[str, tuple[str, tuple[torch.Tensor, ...]]]:
    hidden_states, topk_ids, topk_weights = random_tokens(SMALL, 3)
    return {
        "hidden size": (r"hidden_states: expected shape \[T, 32\]", (hidden_states[:, :-1], topk_ids, topk_weights)),
        "dtype": (r"hidden_states: expected torch.float32", (hidden_states.half(), topk_ids, topk_weights)),
        "rank": (r"hidden_states: expected shape", (hidden_states[None], topk_ids, topk_weights)),
        "top_k": (r"topk_ids: expected shape \[3, 2\]", (hidden_states, topk_ids[:, :1], topk_weights[:, :1])),
        "rows": (r"topk_ids: expected shape \[2, 2\]", (hidden_states[:2], topk_ids, topk_weights)),
        "weights": (r"topk_weights: expected shape \[3, 2\]", (hidden_states, topk_ids, topk_weights[:2])),
        "integer weights": (r"topk_weights: expected a floating", (hidden_states, topk_ids, topk_weights.int())),
        "float ids": (r"topk_ids: expected int32 or int64", (hidden_states, topk_ids.float(), topk_weights)),
        "id too large": (r"expert id 5 is out of range", (hidden_states, topk_ids.fill_(5), topk_weights)),
    }


@pytest.mark.error_path
@pytest.mark.parametrize("what", _wrong_tokens())
def test_wrong_inputs_are_named(what: str, layer: MoELayer) -> None:
    message, tokens = _wrong_tokens()[what]
    with pytest.raises(InputError, match=message):
        layer(*tokens)


@pytest.mark.error_path
def test_more_tokens_than_declared_are_refused_with_both_numbers() -> None:
    layer = build(attrs.evolve(SMALL, workloads=[Workload(max_tokens=4)]), random_tensors(SMALL))
    with pytest.raises(InputError, match=r"5 tokens on this rank.* most 4 "):
        layer(*random_tokens(SMALL, 5))


@pytest.mark.error_path
def test_an_unknown_phase_is_refused(layer: MoELayer) -> None:
    several = build(attrs.evolve(SMALL, workloads=[Workload(phase="decode")]), random_tensors(SMALL))
    with pytest.raises(InputError, match="no route for phase 'verify'"):
        several(*random_tokens(SMALL, 2), phase="verify")


@pytest.mark.error_path
def test_prepared_weights_cannot_be_cast_or_moved(layer: MoELayer) -> None:
    for move in (layer.half, lambda: layer.to("meta")):
        with pytest.raises(InputError, match="build and load a new layer"):
            move()
    assert layer.w13.dtype == torch.float32


@pytest.mark.error_path
def test_the_group_must_fit_the_request() -> None:
    with pytest.raises(InputError, match="ep_size is 2, the group has 1 rank;"):
        MoELayer(attrs.evolve(SMALL, ep_size=2), environment=CPU, manager=torch_manager())
    with pytest.raises(InputError, match="ep_size is 1, the group has 2 ranks"):
        MoELayer(SMALL, environment=CPU, manager=torch_manager(), group=ExpertGroup(rank=0, size=2))


@pytest.mark.error_path
def test_a_pin_that_cannot_run_is_an_error_with_reasons() -> None:
    with pytest.raises(ResolutionError, match=r"\.standard: limit: needs ep_size >= 2, found ep_size 1"):
        MoELayer(attrs.evolve(SMALL, a2a_backend="torch_alltoall"), environment=CPU, manager=torch_manager())


@pytest.mark.error_path
def test_a_runner_refuses_weights_of_another_layout(layer: MoELayer) -> None:
    foreign = PreparedWeights(layout="someone_elses", tensors={})
    with pytest.raises(PluginError, match="reads weight layout 'canonical', these weights are 'someone_elses'"):
        torch_manager().bind_experts(layer.plan, layer.plan.routes[0], foreign, ExpertGroup())


@pytest.mark.error_path
def test_weights_of_another_layout_are_not_refilled(layer: MoELayer) -> None:
    tensors = random_tensors(SMALL)
    theirs = {name: PreparedTensor(data=torch.zeros_like(tensor)) for name, tensor in tensors.items()}
    foreign = PreparedWeights(layout="someone_elses", tensors=theirs)
    with pytest.raises(PluginError, match="layout 'canonical' cannot refill weights in 'someone_elses'; nothing was"):
        torch_manager().process_weights(layer.plan, RawWeights(tensors=tensors), foreign)
    if any(tensor.data.any() for tensor in theirs.values()):
        raise AssertionError("something was written")


@pytest.mark.error_path
def test_pickling_and_copying_say_what_to_do_instead(layer: MoELayer) -> None:
    for duplicate in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"pickle layer\.plan instead"):
            duplicate(layer)
    assert pickle.loads(pickle.dumps(layer.plan)) == layer.plan


@pytest.mark.error_path
def test_a_dict_is_no_raw_weights(layer: MoELayer) -> None:
    with pytest.raises(WeightsError, match=r"expected RawWeights.*, got dict; nothing was loaded"):
        layer.load_weights(random_tensors(SMALL))  # type: ignore[arg-type]
