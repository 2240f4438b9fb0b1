"""Quantized checkpoints that are refused, and what the refusals say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_core.errors import ResolutionError, SpecError, UnknownNameError, UnsupportedModelError, WeightsError
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
        r"tensors do not fit Qwen3MoeForCausalLM; nothing was loaded:\n  .*q_proj\.weight: missing",
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
        ({"hidden_size": "64"}, UnsupportedModelError, r"cannot be loaded: StrictDataclassFieldValidationError"),
        (
            {"num_nextn_predict_layers": "1"},
            SpecError,
            r"number of draft layers .*expected a whole number >= 0, got '1'",
        ),
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
def test_layers_past_the_last_are_drafts_or_refused(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=1)
    with pytest.raises(WeightsError, match=r"num_hidden_layers 1 and 0 draft layers") as refused:
        load_model(folder)
    listed = str(refused.value).splitlines()[1:]
    assert {name.strip().partition(".self")[0].partition(".mlp")[0] for name in listed} >= {"model.layers.1"}
    assert f"  experts 0-3: {MODULES[1]}.*.down_proj.weight_scale_inv" in listed
    assert all(name.startswith("model.layers.1.") for name in refused.value.problems)
    edit_config(folder, num_nextn_predict_layers=1)
    assert set(load_model(folder).experts) == {MODULES[0]}


@pytest.mark.error_path
def test_codes_in_place_of_float_experts_are_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={**FP8, "modules_to_not_convert": [MODULES[0]]})
    with pytest.raises(WeightsError, match=r"experts\.0\.down_proj: its weight holds no floats"):
        load_model(folder)
    floats = {
        f"{MODULES[0]}.gate_up_proj": torch.ones(4, 192, 64, dtype=torch.int8),
        f"{MODULES[0]}.down_proj": torch.ones(4, 64, 96),
    }
    experts = [f"{MODULES[0]}.{number}.{word}" for number in range(4) for word in WORDS]
    for name in experts:
        for suffix in ("weight", "weight_scale_inv"):
            floats[f"{name}.{suffix}"] = None
    edit(folder, **{name.replace(".", "__"): tensor for name, tensor in floats.items()})
    with pytest.raises(WeightsError, match=r"gate_up_proj: holds int8, the model floats"):
        load_model(folder)


@pytest.mark.error_path
def test_arguments_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown dtype 'fp8'"):
        load_model(tmp_path, dtype="fp8")
    for device in ("foo", "cpu:x", "cpu:3", "xpu", 3.5):
        with pytest.raises(SpecError, match="device"):
            load_model(tmp_path, device=device)  # type: ignore[arg-type]


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
