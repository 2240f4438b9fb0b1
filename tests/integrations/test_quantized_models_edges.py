"""What quantized models do besides: matrices outside the experts, drafts, generation, other numbers of experts."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from oracle import relative_error

from moe_core.errors import InputError, UnsupportedModelError
from moe_core.integrations.transformers import NAME, load_model, prepare
from tests.integrations.hf_quantized import (
    HIDDEN,
    IDS,
    MODULES,
    Q_PROJ,
    TOLERANCE,
    change,
    edit,
    edit_config,
)


def test_quantized_matrices_outside_the_experts_become_floats(folder: Path) -> None:
    codes = (torch.randn(64, HIDDEN) * 40).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.03]])
    edit(folder, **change(f"{Q_PROJ}.weight", codes), **change(f"{Q_PROJ}.weight_scale_inv", scale))
    # Scales of a key-value cache say nothing to a cache of floats.
    edit(folder, **change("model.layers.0.self_attn.k_scale", torch.ones(())))
    loaded = load_model(folder, dtype="bf16")
    weight = loaded.model.get_parameter(f"{Q_PROJ}.weight")
    torch.testing.assert_close(weight, (codes.float() * 0.03).bfloat16(), rtol=0, atol=0)
    assert loaded.experts[MODULES[0]].plan.request.dtype == "bf16"


def test_draft_layers_are_left_in_the_file(folder: Path) -> None:
    edit(folder, **change("model.layers.2.mlp.experts.0.gate_proj.weight", torch.zeros(2, 2)))
    edit(folder, **change("mtp.norm.weight", torch.zeros(2)))
    edit_config(folder, num_nextn_predict_layers=1)
    assert set(load_model(folder).experts) == set(MODULES)


def test_generation_settings_come_along(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7], "max_new_tokens": 3}))
    model = load_model(folder).model
    assert model.generation_config.eos_token_id == [7]
    assert model.generate(IDS, do_sample=False).shape[1] <= IDS.shape[1] + 3


@torch.no_grad()
def test_another_number_of_experts_per_token(written: Path) -> None:
    experts = load_model(written).model.get_submodule(MODULES[0])
    hidden_states, weights = torch.randn(3, HIDDEN), torch.full((3, 1), 0.5)
    pairs = torch.tensor([[0, 3], [1, 2], [2, 0]])
    single = [experts(hidden_states, pairs[:, slot : slot + 1], weights) for slot in (0, 1)]
    both = experts(hidden_states, pairs, weights.expand(-1, 2))
    assert relative_error(both, single[0] + single[1]) <= TOLERANCE["same"]


def test_the_experts_stay_with_moe_core(written: Path) -> None:
    loaded = load_model(written)
    assert prepare(loaded.model).keys() == loaded.experts.keys()
    with pytest.raises(InputError, match=r"prepared when they were loaded; give pins"):
        prepare(loaded.model, runner_backend="torch")
    with pytest.raises(UnsupportedModelError, match=r"mlp\.experts: quantized experts .* cannot be saved"):
        loaded.model.state_dict()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(loaded.model)
    loaded.model.set_experts_implementation("eager")
    with pytest.raises(UnsupportedModelError, match=r"'eager' cannot compute these experts: .*fp8_block128"):
        loaded.model(IDS)
    loaded.model.set_experts_implementation(NAME)
    assert loaded.model(IDS).logits.isfinite().all()
