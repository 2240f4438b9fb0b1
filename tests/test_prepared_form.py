"""What a preparation may answer, and that binding leaves it as it is; else refused with the name of the plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import CPU, fake_plugin, runner
from layers import torch_manager

from moe_core import LayerRequest, MoELayer, RawWeights
from moe_core.errors import PluginError, UnknownNameError
from moe_core.payloads import PreparedTensor, PreparedWeights, StandardTokens

LAYER = LayerRequest(num_experts=2, top_k=1, hidden_size=8, intermediate_size=8, runner_backend="toy")
SHAPES = {"w13": (2, 16, 8), "w2": (2, 8, 8)}
TOKENS = (torch.ones(3, 8, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def _raw(value: float = 1.0) -> RawWeights:
    return RawWeights(tensors={n: torch.full(s, value, dtype=torch.bfloat16) for n, s in SHAPES.items()})


def _layer(make: Callable[[dict[str, torch.Tensor]], Any], bind: Callable[[PreparedWeights], None]) -> MoELayer:
    """A layer of a plugin that prepares with `make`, and calls `bind` where it binds experts that scale tokens."""

    def prepare(weights: RawWeights, out: PreparedWeights | None) -> Any:
        if out is None:
            return make(weights.tensors)
        for name, tensor in weights.tensors.items():
            out[name].copy_(tensor)
        return out

    def fused_experts(weights: PreparedWeights) -> Any:
        w13 = weights["w13"]
        bind(weights)

        def experts(tokens: StandardTokens) -> torch.Tensor:
            return tokens.hidden_states * w13[0, 0, 0]

        return experts

    manager = torch_manager()
    hooks = {"process_weights_after_loading": prepare, "fused_experts": fused_experts}
    manager.register("toy", fake_plugin("toy", [], [runner()], hooks))
    return MoELayer(LAYER, environment=CPU, manager=manager)


def _weights(tensors: dict[str, torch.Tensor], data: Any = torch.clone, **fields: Any) -> PreparedWeights:
    prepared = {name: PreparedTensor(data=data(tensor), **fields) for name, tensor in tensors.items()}
    return PreparedWeights(layout="canonical", tensors=prepared)


def _named(tensors: dict[str, torch.Tensor], name: Any) -> PreparedWeights:
    return PreparedWeights(layout="canonical", tensors={name: PreparedTensor(data=tensors["w13"])})


def _scaled(tensors: dict[str, torch.Tensor]) -> PreparedWeights:
    prepared = _weights(tensors)
    prepared.token_scale = "x_scale"
    return prepared


DENSE = "expected PreparedTensor objects of dense tensors under plain names, not under"
WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "nothing": (lambda raw: None, "expected PreparedWeights, got NoneType"),
    "a list": (
        lambda raw: PreparedWeights(layout="canonical", tensors=[*raw]),  # type: ignore[arg-type]
        "expected a dict of PreparedTensor, got list",
    ),
    "no tensors": (lambda raw: _weights({}), "under plain names, there are none"),
    "bare tensors": (
        lambda raw: PreparedWeights(layout="canonical", tensors=dict(raw)),  # type: ignore[arg-type]
        DENSE,
    ),
    "arrays": (lambda raw: _weights(raw, lambda tensor: tensor.float().numpy()), DENSE),
    "sparse": (lambda raw: _weights(raw, lambda tensor: tensor.to_sparse()), DENSE),
    "number as name": (lambda raw: _named(raw, 3), rf"{DENSE} \[3\]"),
    "dotted name": (lambda raw: _named(raw, "a.b"), rf"{DENSE} \['a.b'\]"),
    "name of the layer": (lambda raw: _named(raw, "plan"), "attributes of MoELayer, which has plan itself"),
    "no such axis": (
        lambda raw: _weights(raw, expert_axis=5),
        r"w13 \[2, 16, 8\]: expert_axis 5 does not count the 2 local experts",
    ),
    "another axis": (lambda raw: _weights(raw, expert_axis=1), "expert_axis 1 does not count"),
    "axis of borrowed": (
        lambda raw: _weights(raw, lambda t: t, owned=False, expert_axis=-4),
        "expert_axis -4 does not",
    ),
    "no axis": (lambda raw: _weights(raw, expert_axis="0"), "expert_axis '0' does not count"),
    "elsewhere": (lambda raw: _weights(raw, lambda t: t.to("meta")), "w13 .* lies on meta, the raw weights on cpu"),
    "no such scale": (_scaled, "token_scale names 'x_scale', expected one of w13, w2"),
    "other layout": (
        lambda raw: PreparedWeights(layout="mine", tensors=_weights(raw).tensors),
        "'canonical', got 'mine'",
    ),
}


@pytest.mark.error_path
@pytest.mark.parametrize("what", WRONG)
def test_an_answer_of_another_form_names_the_plugin_and_loads_nothing(what: str) -> None:
    make, message = WRONG[what]
    layer = _layer(make, lambda weights: None)
    with pytest.raises(PluginError, match=f"plugin 'toy' .*, hook process_weights_after_loading: .*{message}"):
        layer.load_weights(_raw())
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("axis", [0, -3, None])
def test_an_axis_may_be_counted_from_either_end(axis: int | None) -> None:
    layer = _layer(lambda raw: _weights(raw, expert_axis=axis), lambda weights: None)
    layer.load_weights(_raw(2.0))
    assert torch.equal(layer(*TOKENS), TOKENS[0] * 2)


@pytest.mark.error_path
def test_a_reload_of_a_plugin_that_is_gone_is_refused_before_anything_is_written() -> None:
    layer = _layer(_weights, lambda weights: None)
    layer.load_weights(_raw(2.0))
    layer._manager.unregister("toy")
    with pytest.raises(UnknownNameError, match=r"unknown plugin 'toy'.* group 'moe_core\.backends'") as caught:
        layer.load_weights(_raw(3.0))
    assert not hasattr(caught.value, "__notes__")
    assert torch.equal(layer(*TOKENS), TOKENS[0] * 2)


def _clear(weights: PreparedWeights) -> None:
    weights.tensors.clear()


def _replace(weights: PreparedWeights) -> None:
    weights.tensors["w2"].data = weights["w2"].clone()


def _add(weights: PreparedWeights) -> None:
    weights.tensors["w3"] = weights.tensors["w2"]


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_clear, "w13 is gone, w2 is gone"),
        (_replace, "w2 has other memory, shape, strides or dtype"),
        (_add, "w3 is new"),
    ],
)
def test_binding_changes_no_prepared_weights(change: Callable[[PreparedWeights], None], said: str) -> None:
    layer = _layer(_weights, change)
    with pytest.raises(PluginError, match=f"'toy' .*, hook fused_experts: prepared weights stay as they are; {said}"):
        layer.load_weights(_raw())
