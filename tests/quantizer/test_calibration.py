"""What a calibration records, against the inputs of each expert computed one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from moe_core.errors import UnsupportedModelError, WeightsError

transformers = pytest.importorskip("transformers")

from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

from moe_core.quantizer.calibration import calibrate  # noqa: E402

HIDDEN, INNER, EXPERTS, VOCABULARY = 24, 16, 5, 7


class _Mlp(torch.nn.Module):
    def __init__(self, config: object) -> None:
        super().__init__()
        self.experts = Qwen3MoeExperts(config)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()

    def forward(self, hidden_states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        weights = torch.full(ids.shape, 0.5)
        return self.experts(hidden_states, top_k_weights=weights, top_k_index=ids)


class _Layer(torch.nn.Module):
    def __init__(self, config: object) -> None:
        super().__init__()
        self.mlp = _Mlp(config)


class _Model(torch.nn.Module):
    """Two MoE layers whose tokens come from a table; token v goes to experts v % 4 and 3, so the last one has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        config = transformers.Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=2
        )
        config._experts_implementation = "eager"
        self.layers = torch.nn.ModuleList([_Layer(config), _Layer(config)])
        self.table = torch.nn.Parameter(torch.randn(2, VOCABULARY, HIDDEN))
        self.device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> None:
        for layer, table in zip(self.layers, self.table, strict=True):
            layer.mlp(table[input_ids[0]], _route(input_ids[0]))


def _route(tokens: torch.Tensor) -> torch.Tensor:
    return torch.stack([tokens % 4, torch.full_like(tokens, 3)], dim=1)


def test_largest_magnitudes_per_expert() -> None:
    model = _Model()
    windows = [torch.tensor([[0, 1, 5]]), torch.tensor([[2, 5]])]
    done: list[int] = []
    found = calibrate(model, windows, default=9.0, progress=done.append)
    assert done == [1, 2]
    assert found.default == 9.0
    assert sorted(found.layers) == [0, 1]
    for layer, inputs in found.layers.items():
        first, second = [0.0] * EXPERTS, [0.0] * EXPERTS
        experts = model.layers[layer].mlp.experts
        for token in (0, 1, 2, 5):
            for expert in _route(torch.tensor([token]))[0].tolist():
                row = model.table[layer, token].double()
                gate, up = (experts.gate_up_proj[expert].double() @ row).chunk(2)
                inner = gate * torch.sigmoid(gate) * up
                first[expert] = max(first[expert], row.abs().max().item())
                second[expert] = max(second[expert], inner.abs().max().item())
        # fp32 sums of 24 products of order 1.
        assert inputs.first == pytest.approx(first, rel=1e-5)
        assert inputs.second == pytest.approx(second, rel=1e-5)
        assert inputs.first[4] == inputs.second[4] == 0
        assert found.of(layer, 4, "m") == {"gate": max(first), "up": max(first), "down": pytest.approx(max(second))}
        assert not experts._forward_pre_hooks


@pytest.mark.error_path
def test_what_cannot_be_calibrated() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear has no experts modules"):
        calibrate(torch.nn.Linear(2, 2), [])
    unnumbered = torch.nn.ModuleDict({"mlp": _Model().layers[0].mlp})
    with pytest.raises(UnsupportedModelError, match=r"mlp\.experts: expected one per numbered layer"):
        calibrate(unnumbered, [])
    for bad in (math.nan, math.inf):
        model = _Model()
        with torch.no_grad():
            model.table[1, 2, 3] = bad
        with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.experts: inputs .* infinite or NaN"):
            calibrate(model, [torch.tensor([[1, 2]])])
        assert not model.layers[1].mlp.experts._forward_pre_hooks


@pytest.mark.error_path
def test_a_refused_module_leaves_no_hooks_on_those_before_it() -> None:
    model = _Model()
    model.add_module("unnumbered", _Model().layers[0].mlp)
    with pytest.raises(UnsupportedModelError, match=r"unnumbered\.experts: expected one per numbered layer"):
        calibrate(model, [])
    assert not any(module._forward_pre_hooks for module in model.modules())
