"""What model configurations and files beside them say about quantization, layer by layer."""

from __future__ import annotations

import json

import attrs
import pytest
from fakes import DECODE, SM90, plan
from model_configs import BASE, changed, only_request, schemes

from moe_core.model_config import draft_layer_groups, layer_groups, read_config
from moe_core.quant import BF16, FP8_BLOCK128, NVFP4, W4A8_INT8, W8A8_INT8, LayerQuant

pytestmark = pytest.mark.error_path

NVFP4_BUT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.4*", "mtp*"]}


def test_layers_that_are_left_alone_are_a_group_of_their_own():
    config = changed(quantization_config=NVFP4_BUT)
    assert schemes(layer_groups(config)) == {(0, 1, 2, 3, 5): "nvfp4", (4,): "bf16"}
    assert schemes(layer_groups(config, quant=FP8_BLOCK128)) == {(0, 1, 2, 3, 4, 5): "fp8_block128"}


def test_the_quantization_of_a_part_or_of_the_whole():
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for nested in (
        {"text_config": {**BASE, "quantization_config": method}},
        {"text_config": BASE, "quantization_config": method},
        {"text_config": BASE, "compression_config": method},
    ):
        assert only_request({"model_type": "omni", **nested}).quant == LayerQuant.of(FP8_BLOCK128)


def test_the_dtype_of_experts_that_some_say_beside_the_quantization():
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    config = changed(expert_dtype="fp4", quantization_config=method)
    assert str(only_request(config).quant) == "mxfp4_w4a8_g128"
    own = changed(expert_dtype="fp4", quantization_config={**method, "expert_dtype": "fp8"})
    assert str(only_request(own).quant) == "fp8_block128_ue8m0"


def test_a_layer_without_gate_is_asked_for_its_two_projections():
    layers = {
        f"backbone.layers.1.mixer.experts.{e}.{p}_proj": {"quant_algo": "NVFP4"}
        for e in range(8)
        for p in ("up", "down")
    }
    method = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    config = changed(model_type="nemotron_h", mlp_hidden_act="relu2", quantization_config=method)
    assert schemes(layer_groups(config)) == {(0, 2, 3, 4, 5): "bf16", (1,): "nvfp4"}


@pytest.mark.parametrize(
    ("family", "key", "layer"),
    [("deepseek_v3", "num_nextn_predict_layers", 6), ("qwen3_next", "mtp_num_hidden_layers", 6)],
)
def test_a_draft_layer_is_not_quantized_with_the_model(family, key, layer):
    config = changed(
        model_type=family, quantization_config={**NVFP4_BUT, "ignore": ["model.layers.6*", "mtp*"]}, **{key: 1}
    )
    assert schemes(layer_groups(config)) == {(0, 1, 2, 3, 4, 5): "nvfp4"}
    assert schemes(draft_layer_groups(config)) == {(layer,): "bf16"}
    assert schemes(draft_layer_groups(config, dtype="fp16")) == {(layer,): "fp16"}


def test_a_quantized_draft_layer_keeps_its_scheme():
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = changed(model_type="deepseek_v3", num_nextn_predict_layers=1, quantization_config=method)
    assert schemes(draft_layer_groups(config)) == {(6,): "fp8_block128"}


def test_tokens_of_an_unquantized_draft_layer_travel_in_bf16():
    """And those of the quantized layers in fp8, whichever is resolved first."""
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["model.layers.6"]}
    config = changed(model_type="deepseek_v3", num_nextn_predict_layers=1, quantization_config=method)
    groups = {"model": layer_groups(config), "draft": draft_layer_groups(config)}
    for order in (("model", "draft"), ("draft", "model")):
        dtypes = {}
        for name in order:
            (group,) = groups[name]
            layer = attrs.evolve(group.request, workloads=DECODE, a2a_backend="deepep", ep_size=2)
            dtypes[name] = str(plan(layer, SM90).routes[0].token_dtype)
        assert dtypes == {"model": "fp8/column_128", "draft": "bf16"}


def _folder(path, **files):
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_quantization_in_a_file_beside(tmp_path):
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}
    folder = _folder(tmp_path, config=BASE, hf_quant_config=content)
    assert only_request(read_config(folder)).quant == LayerQuant.of(NVFP4)
    # The file alone says what it says.
    assert only_request(read_config(folder / "config.json")).quant == LayerQuant.of(BF16)


def test_the_model_s_own_quantization_wins_over_a_file_beside(tmp_path):
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    content = {"quantization": {"quant_algo": "NVFP4"}}
    folder = _folder(tmp_path, config={**BASE, "quantization_config": method}, hf_quant_config=content)
    assert only_request(read_config(folder)).quant == LayerQuant.of(FP8_BLOCK128)


def test_a_description_of_every_tensor(tmp_path):
    words = {0: ("W8A8_DYNAMIC", "W8A8_DYNAMIC"), 1: ("W4A8_DYNAMIC", "W8A8_DYNAMIC")}
    description = {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0"}
    for layer, (w13, w2) in words.items():
        for expert in range(8):
            for projection, word in (("gate", w13), ("up", w13), ("down", w2)):
                description[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"] = word
    folder = _folder(tmp_path, config=changed(num_hidden_layers=2), quant_model_description=description)
    first, second = layer_groups(read_config(folder))
    assert first.request.quant == LayerQuant.of(W8A8_INT8)
    assert second.request.quant == LayerQuant(W4A8_INT8, W8A8_INT8)
