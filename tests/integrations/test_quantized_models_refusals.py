"""Quantized checkpoints that are refused, and what the refusals say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_core.errors import ResolutionError, SpecError, UnsupportedModelError, WeightsError
from moe_core.integrations.transformers import load_model
from moe_core.integrations.transformers.stored_experts import find_stored_experts
from moe_core.manager import BackendManager
from tests.integrations.hf_plain_experts import PlainExperts, decorate
from tests.integrations.hf_quantized import (
    FP8,
    MODULES,
    Q_PROJ,
    WORDS,
    change,
    edit,
    edit_config,
)


@pytest.mark.error_path
def test_pins_are_pins(written: Path) -> None:
    loaded = load_model(written, runner_backend="torch.masked")
    assert {experts.plan.routes[0].runner.spec.short_name for experts in loaded.experts.values()} == {"torch.masked"}
    with pytest.raises(ResolutionError, match="no backend combination fits"):
        load_model(written, manager=BackendManager())


EXPERT = f"{MODULES[1]}.2"


SPOILED: dict[str, tuple[dict[str, Any], str]] = {
    "expert": (
        change(f"{EXPERT}.up_proj.weight", None) | change(f"{EXPERT}.down_proj.weight_scale_inv", torch.ones(3, 3)),
        r"(?s)nothing was loaded.*2\.up_proj\.weight: missing.*2\.down_proj\.weight_scale_inv",
    ),
    "dense_missing": (
        change(f"{Q_PROJ}.weight", None),
        r"outside the experts do not fit Qwen3MoeForCausalLM; nothing was loaded:\n  .*q_proj\.weight: missing",
    ),
    "dense_unknown": (
        change("model.layers.0.self_attn.sinks", torch.ones(2)),
        r"self_attn\.sinks: unknown to the model",
    ),
    "dense_not_understood": (
        change(f"{Q_PROJ}.weight", torch.zeros(64, 64, dtype=torch.int8)),
        r"quantized tensors outside the experts that are not understood.*\n  .*q_proj\.weight: ",
    ),
    "dense_leftovers": (
        change(f"{Q_PROJ}.weight", torch.zeros(64, 64).to(torch.float8_e4m3fn))
        | change(f"{Q_PROJ}.weight_scale_inv", torch.ones(1, 1))
        | change(f"{Q_PROJ}.rotation", torch.ones(2)),
        r"q_proj\.rotation.*nothing of a matrix in storage scaled reads it",
    ),
}


@pytest.mark.error_path
@pytest.mark.parametrize("name", SPOILED)
def test_tensors_that_do_not_fit(name: str, folder: Path) -> None:
    changes, message = SPOILED[name]
    edit(folder, **changes)
    with pytest.raises(WeightsError, match=message):
        load_model(folder)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "nobodys"}, UnsupportedModelError, r"cannot be loaded: .*nobodys"),
        ({"model_type": "vit"}, UnsupportedModelError, r"no causal language model for 'vit'"),
        ({"quantization_config": {"quant_method": "magic"}}, SpecError, r"quant_method 'magic' is not read"),
        ({"dtype": None}, SpecError, r"names no dtype"),
        (
            {"num_experts": 5, "num_local_experts": 5},
            WeightsError,
            r"gate\.weight: has shape \[4, 64\], the model \[5, 64\]",
        ),
    ],
)
def test_configurations_that_do_not_fit(
    changes: dict[str, Any], error: type[Exception], message: str, folder: Path
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(error, match=message):
        load_model(folder)


@pytest.mark.error_path
def test_a_class_that_computes_something_else_is_refused(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return hidden_states

    monkeypatch.setattr(Qwen3MoeExperts, "forward", forward)
    with pytest.raises(UnsupportedModelError, match=r"Qwen3MoeExperts .* computes something else than its flags say"):
        load_model(written)


@pytest.mark.error_path
def test_weights_besides_the_projections_are_refused() -> None:
    experts: Any = decorate(PlainExperts)
    experts.act_fn = nn.PReLU()
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": experts})])})
    names = [f"layers.0.experts.{expert}.{word}.weight" for expert in range(4) for word in WORDS]
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.experts has weights .* \(act_fn\.weight\)"):
        find_stored_experts(model, names, FP8, "fp32", torch.device("cpu"))
