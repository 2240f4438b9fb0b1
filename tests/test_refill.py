"""What a plugin does wrong in a reload, and names that a layer cannot give to tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from layers import build, random_tensors, random_tokens, torch_manager

from moe_core import BackendManager, Environment, LayerRequest, MoELayer, RawWeights
from moe_core.activation import ActivationSpec
from moe_core.backends.torch import local
from moe_core.backends.torch import weights as torch_weights
from moe_core.errors import PluginError, WeightsError
from moe_core.payloads import PreparedTensor, PreparedWeights
from moe_core.plan import MoEPlan

SMALL = LayerRequest(num_experts=5, top_k=2, hidden_size=32, intermediate_size=24, dtype="fp32", bias=True)
CPU = Environment(device_type="cpu", packages={"torch": torch.__version__})


@pytest.fixture
def layer() -> MoELayer:
    return build(SMALL, random_tensors(SMALL))


def _midway(weights: RawWeights, out: PreparedWeights) -> None:
    out["w13"][0].copy_(weights.tensors["w13"][0])
    raise RuntimeError("out of memory")


def _midway_in_words(weights: RawWeights, out: PreparedWeights) -> None:
    out["w13"].copy_(weights.tensors["w13"])
    raise WeightsError("expert 1: no such scale")


def _interrupted(weights: RawWeights, out: PreparedWeights) -> None:
    raise KeyboardInterrupt


def _relabelling(weights: RawWeights, out: PreparedWeights) -> None:
    out.layout = "someone_elses"


def _swapping(weights: RawWeights, out: PreparedWeights) -> None:
    out.tensors["w13"] = PreparedTensor(data=out["w13"].clone())


def _replacing(weights: RawWeights, out: PreparedWeights) -> None:
    out.tensors["w13"].data = out["w13"].clone()


def _pointing_elsewhere(weights: RawWeights, out: PreparedWeights) -> None:
    out["w13"].data = out["w13"].clone()


def _reshaping(weights: RawWeights, out: PreparedWeights) -> None:
    out.tensors["w13"].data = out["w13"].flatten()


def _dropping(weights: RawWeights, out: PreparedWeights) -> None:
    del out.tensors["w2"]


def _adding(weights: RawWeights, out: PreparedWeights) -> None:
    out.tensors["more"] = PreparedTensor(data=out["w13"])


def _naming_a_scale(weights: RawWeights, out: PreparedWeights) -> None:
    out.token_scale = "w13"


def _faulty_reloads(monkeypatch: pytest.MonkeyPatch, fault: Callable[[RawWeights, PreparedWeights], None]) -> None:
    """Reloads of the torch plugin end with `fault`."""
    original = torch_weights.prepare

    def faulty(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
        prepared = original(plan, weights, out)
        if out is not None:
            fault(weights, out)
        return prepared

    monkeypatch.setattr(torch_weights, "prepare", faulty)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (_midway, PluginError, "plugin 'torch'.*: out of memory"),
        (_midway_in_words, WeightsError, "expert 1: no such scale"),
        (_interrupted, KeyboardInterrupt, None),
        (_relabelling, PluginError, "plugin 'torch'.*expected layout 'canonical', got 'someone_elses'"),
        (_swapping, PluginError, "plugin 'torch'.*w13 has other memory"),
        (_replacing, PluginError, "plugin 'torch'.*w13 has other memory"),
        (_pointing_elsewhere, PluginError, "plugin 'torch'.*w13 has other memory"),
        (_reshaping, PluginError, "plugin 'torch'.*w13 has other memory, shape"),
        (_dropping, PluginError, "plugin 'torch'.*w2 is gone"),
        (_adding, PluginError, "plugin 'torch'.*more is new"),
        (_naming_a_scale, PluginError, "plugin 'torch'.*token_scale is 'w13' instead of None"),
    ],
)
def test_after_a_failed_reload_the_layer_refuses_until_one_succeeds(
    layer: MoELayer, monkeypatch: pytest.MonkeyPatch, fault: Any, error: type[BaseException], message: str | None
) -> None:
    tokens, places = random_tokens(SMALL, 6), {name: p.data_ptr() for name, p in layer.named_parameters()}
    new = RawWeights(tensors=random_tensors(SMALL, 3))
    with monkeypatch.context() as patched:
        _faulty_reloads(patched, fault)
        for _ in range(2):
            with pytest.raises(error, match=message) as raised:
                layer.load_weights(new)
            assert "may be partly overwritten: load all of them again" in raised.value.__notes__[-1]
            with pytest.raises(WeightsError, match=r"the last reload of this layer failed.*call load_weights again"):
                layer(*tokens)
    with pytest.raises(WeightsError, match="missing"):
        layer.load_weights(RawWeights(tensors={}))
    with pytest.raises(WeightsError, match="the last reload of this layer failed"):
        layer(*tokens)
    layer.load_weights(new)
    assert torch.equal(layer(*tokens), build(SMALL, new.tensors)(*tokens))
    assert places == {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}


@pytest.mark.error_path
def test_a_reload_that_is_refused_before_the_plugin_leaves_the_layer_serving(layer: MoELayer) -> None:
    tokens = random_tokens(SMALL, 6)
    before = layer(*tokens)
    for tensors in ({}, {name: tensor.to("meta") for name, tensor in random_tensors(SMALL, 3).items()}):
        with pytest.raises(WeightsError):
            layer.load_weights(RawWeights(tensors=tensors))
        assert torch.equal(layer(*tokens), before)


@pytest.mark.error_path
def test_a_forward_beside_a_reload_is_told_of_it(layer: MoELayer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, told = random_tokens(SMALL, 6), []
    process_weights = BackendManager.process_weights

    def process_beside_a_forward(*arguments: Any) -> Any:
        with pytest.raises(WeightsError, match=r"is not over.*wait for it"):
            layer(*tokens)
        told.append(True)
        return process_weights(*arguments)

    new = random_tensors(SMALL, 3)
    with monkeypatch.context() as patched:
        patched.setattr(BackendManager, "process_weights", process_beside_a_forward)
        layer.load_weights(RawWeights(tensors=new))
    assert told
    assert torch.equal(layer(*tokens), build(SMALL, new)(*tokens))


@pytest.mark.error_path
def test_callables_of_a_reload_that_could_not_be_bound_are_bound_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    request = attrs.evolve(SMALL, activation=ActivationSpec(kind="module", gated=False))
    tensors, tokens = random_tensors(request), random_tokens(request, 6)
    layer, fresh = (MoELayer(request, environment=CPU, manager=torch_manager()) for _ in range(2))
    layer.load_weights(RawWeights(tensors=tensors, activation=torch.tanh))
    new = RawWeights(tensors=tensors, activation=torch.relu)
    with monkeypatch.context() as patched:
        patched.setattr(local, "bind_standard", lambda *_: ())
        with pytest.raises(PluginError, match="bind_standard"):
            layer.load_weights(new)
    with pytest.raises(WeightsError, match="the last reload of this layer failed"):
        layer(*tokens)
    layer.load_weights(new)
    fresh.load_weights(new)
    assert torch.equal(layer(*tokens), fresh(*tokens))


@pytest.mark.error_path
@pytest.mark.parametrize("name", ["plan", "request", "training", "forward", "_bound", "T_destination"])
def test_a_tensor_named_like_an_attribute_of_the_layer_is_refused_before_any_is_registered(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = torch_weights.prepare

    def naming(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
        prepared = original(plan, weights, out)
        prepared.tensors[name] = PreparedTensor(data=torch.zeros(5))
        return prepared

    monkeypatch.setattr(torch_weights, "prepare", naming)
    layer = MoELayer(SMALL, environment=CPU, manager=torch_manager())
    with pytest.raises(PluginError, match=rf"plugin 'torch'.*attributes of MoELayer, which has {name} itself"):
        layer.load_weights(RawWeights(tensors=random_tensors(SMALL)))
    assert not list(layer.parameters())
