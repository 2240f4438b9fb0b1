"""Quantized checkpoints of families that name, nest or mix their experts in ways of their own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import relative_error

from moe_core.integrations.transformers import load_model
from moe_core.quantizer.checkpoint import quantize_checkpoint
from tests.integrations.hf_catalogue import decorated_classes
from tests.integrations.hf_quantized import IDS, TOLERANCE

ENTRIES = {entry.name: entry for entry in decorated_classes()}
# Norm of a layer's error beside the float one: three matrices and two inputs in int8, off by 0.7 % each, times four.
# Gate for up, or experts taken for one another, would give about 140 %.
ROUNDING = 0.06

# Their routers lie in the module whose tensors are the experts' (granite: in its block, laguna: its bias); jamba and
# kimi name the block otherwise, nemotron has no gate.
FAMILIES = (
    "GraniteMoeExperts",
    "GraniteMoeHybridExperts",
    "JambaExperts",
    "KimiLinearExperts",
    "LagunaExperts",
    "NemotronHExperts",
)


def assert_layers_agree(model: Any, loaded: Any, name: str) -> None:
    """On the tokens of the float model: whole models would tell where rounding turns the routing."""
    errors = []

    def compare(module: str) -> Any:
        served = loaded.model.get_submodule(module)
        return lambda _, routed, expected: errors.append(relative_error(served(*routed), expected))

    experts = ENTRIES[name].experts_in(model)
    hooks = [module.register_forward_hook(compare(at)) for at, module in experts.items()]
    model(IDS)
    for hook in hooks:
        hook.remove()
    assert len(errors) == len(experts) > 0
    assert 1e-3 <= max(errors) <= ROUNDING


def assert_the_rest_is_equal(model: Any, loaded: Any) -> None:
    state = model.state_dict()
    for name, parameter in (*loaded.model.named_parameters(), *loaded.model.named_buffers()):
        if name in state:
            torch.testing.assert_close(parameter, state[name], rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_family_comes_back_layer_by_layer(name: str, tmp_path: Path) -> None:
    model: Any = ENTRIES[name].build_model(seed=3)
    model.config.dtype = torch.float32
    for buffer_name, bias in model.state_dict().items():
        if buffer_name.endswith("e_score_correction_bias"):
            bias.copy_(torch.linspace(-0.1, 0.1, len(bias)))
    model.save_pretrained(tmp_path / "float")
    quantize_checkpoint(tmp_path / "float", tmp_path / "written", "w8a8_int8")
    loaded = load_model(tmp_path / "written")
    assert_layers_agree(model, loaded, name)
    assert_the_rest_is_equal(model, loaded)


@torch.no_grad()
def test_the_text_part_of_a_larger_model(tmp_path: Path) -> None:
    entry = ENTRIES["Qwen3_5MoeExperts"]
    module: Any = importlib.import_module(entry.module_name)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = module.Qwen3_5MoeConfig(text_config=entry.build_config().to_dict(), vision_config=vision)
    config.dtype = config.text_config.dtype = torch.float32
    torch.manual_seed(0)
    whole = module.Qwen3_5MoeForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "float")
    quantize_checkpoint(tmp_path / "float", tmp_path / "written", "w8a8_int8")

    floats, loaded = load_model(tmp_path / "float"), load_model(tmp_path / "written")
    assert type(loaded.model) is module.Qwen3_5MoeForCausalLM
    assert relative_error(floats.model(IDS).logits, whole(IDS).logits) <= TOLERANCE["same"]
    assert_layers_agree(floats.model, loaded, "Qwen3_5MoeExperts")


@pytest.mark.skipif("AriaExperts" not in ENTRIES, reason="not dispatched by this version")
@torch.no_grad()
def test_floats_under_names_that_only_transformers_knows(tmp_path: Path) -> None:
    model: Any = ENTRIES["AriaExperts"].build_model(seed=3)
    model.config.dtype = torch.float32
    model.save_pretrained(tmp_path)
    assert relative_error(load_model(tmp_path).model(IDS).logits, model(IDS).logits) <= TOLERANCE["same"]
