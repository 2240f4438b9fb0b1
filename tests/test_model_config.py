"""Model configurations of many families: sizes, which layers have experts, activations, and what is refused."""

from __future__ import annotations

import json

import attrs
import pytest
from fakes import DECODE, SM90, plan

from moe_core.activation import GEGLU_TANH, RELU2, SWIGLU, SWIGLU_OAI, ActivationSpec
from moe_core.errors import SpecError, UnknownNameError
from moe_core.model_config import draft_layer_groups, layer_groups, read_config
from moe_core.model_layers import DRAFT_MODULES, EXPERTS_MODULES, draft_modules, experts_module
from moe_core.quant import BF16, FP8_BLOCK128, NVFP4, W4A8_INT8, W8A8_INT8, LayerQuant

pytestmark = pytest.mark.error_path

BASE = {
    "model_type": "some_moe",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def _with(**changes):
    config = {**BASE, **changes}
    return {name: value for name, value in config.items() if value != "removed"}


def _only_request(config, **more):
    (group,) = layer_groups(config, **more)
    return group.request


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_names_of_the_number_of_experts(name):
    assert _only_request(_with(**{"num_experts": "removed", name: 12})).num_experts == 12


@pytest.mark.parametrize("name", ["num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k"])
def test_names_of_top_k(name):
    assert _only_request(_with(**{"num_experts_per_tok": "removed", name: 5})).top_k == 5


def test_the_experts_own_intermediate_size_wins():
    assert _only_request(BASE).intermediate_size == 256
    assert _only_request(_with(moe_intermediate_size=48)).intermediate_size == 48


@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"num_dense_layers": 1}, (1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "hash_moe", "dense"]}, (1, 2, 4)),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe"]}, (1, 3)),
        ({"layers_block_type": ["mamba", "attention"] * 3}, (0, 1, 2, 3, 4, 5)),
        ({"hybrid_override_pattern": "ME*E"}, (1, 3)),
        ({"moe_layers": [0, 5], "interleave_moe_layer_step": 3}, (0, 5)),
        ({"interleave_moe_layer_step": 3}, (2, 5)),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3, 5)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}, (1, 2, 3, 4, 5)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2}, (1, 3)),
        ({"moe_layer_freq": [0, 1, 1, 0, 0, 1]}, (1, 2, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
    ],
    ids=str,
)
def test_layers_with_experts(rule, layers):
    (group,) = layer_groups(_with(**rule))
    assert group.layers == layers


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, SWIGLU),
        ({"hidden_act": "removed", "hidden_activation": "gelu_pytorch_tanh"}, GEGLU_TANH),
        ({"model_type": "nemotron_h", "mlp_hidden_act": "relu2"}, RELU2),
        ({"model_type": "lfm2_moe", "hidden_act": "removed"}, SWIGLU),
        ({"model_type": "deepseek_v4", "swiglu_limit": 10.0}, ActivationSpec(limit=10.0)),
        (
            {"model_type": "gpt_oss", "swiglu_limit": 7.0},
            ActivationSpec(alpha=1.702, limit=7.0, beta=1.0, row_order="interleaved"),
        ),
        ({"model_type": "minimax_m3_vl_text"}, SWIGLU_OAI),
    ],
    ids=str,
)
def test_activations(changes, activation):
    assert _only_request(_with(**changes)).activation == activation


def test_traits_that_only_the_family_tells():
    assert _only_request(_with(model_type="gpt_oss")).bias
    assert _only_request(_with(model_type="llama4_text")).weight_on_input
    assert _only_request(_with(model_type="muse_spark_text")).post_norm


def test_the_text_part_of_a_larger_model_is_read():
    nested = {"model_type": "omni", "thinker_config": {"text_config": BASE}, "hidden_size": 1}
    assert _only_request(nested).hidden_size == 64


def test_sizes_per_layer_make_groups():
    first, second = layer_groups(_with(moe_topk=[1, 1, 2, 2, 1, 1], num_experts_per_tok="removed"))
    assert (first.layers, first.request.top_k) == ((0, 1, 4, 5), 1)
    assert (second.layers, second.request.top_k) == ((2, 3), 2)


def test_dtype_and_scheme_can_be_given():
    assert _only_request(_with(dtype="float16", torch_dtype="removed")).dtype == "fp16"
    request = _only_request(_with(torch_dtype="removed"), dtype="bf16", quant=FP8_BLOCK128)
    assert (request.dtype, request.quant.w2) == ("bf16", FP8_BLOCK128)


NVFP4_BUT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.4*", "mtp*"]}


def _schemes(groups):
    return {group.layers: str(group.request.quant) for group in groups}


def test_layers_that_are_left_alone_are_a_group_of_their_own():
    config = _with(quantization_config=NVFP4_BUT)
    assert _schemes(layer_groups(config)) == {(0, 1, 2, 3, 5): "nvfp4", (4,): "bf16"}
    assert _schemes(layer_groups(config, quant=FP8_BLOCK128)) == {(0, 1, 2, 3, 4, 5): "fp8_block128"}


def test_the_quantization_of_a_part_or_of_the_whole():
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for nested in (
        {"text_config": {**BASE, "quantization_config": method}},
        {"text_config": BASE, "quantization_config": method},
        {"text_config": BASE, "compression_config": method},
    ):
        assert _only_request({"model_type": "omni", **nested}).quant == LayerQuant.of(FP8_BLOCK128)


def test_the_dtype_of_experts_that_some_say_beside_the_quantization():
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    config = _with(expert_dtype="fp4", quantization_config=method)
    assert str(_only_request(config).quant) == "mxfp4_w4a8_g128"
    own = _with(expert_dtype="fp4", quantization_config={**method, "expert_dtype": "fp8"})
    assert str(_only_request(own).quant) == "fp8_block128_ue8m0"


def test_a_layer_without_gate_is_asked_for_its_two_projections():
    layers = {
        f"backbone.layers.1.mixer.experts.{e}.{p}_proj": {"quant_algo": "NVFP4"} for e in (0, 1) for p in ("up", "down")
    }
    method = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    config = _with(model_type="nemotron_h", mlp_hidden_act="relu2", quantization_config=method)
    assert _schemes(layer_groups(config)) == {(0, 2, 3, 4, 5): "bf16", (1,): "nvfp4"}


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("mixtral", "model.layers.7.block_sparse_moe.experts"),
        ("minimax_m2", "model.layers.7.block_sparse_moe.experts"),
        ("jamba", "model.layers.7.feed_forward.experts"),
        ("nemotron_h", "backbone.layers.7.mixer.experts"),
        ("deepseek_v4", "layers.7.ffn.experts"),
        ("qwen3_moe", "model.layers.7.mlp.experts"),
        ("of_tomorrow", "model.layers.7.mlp.experts"),
    ],
)
def test_names_of_experts_modules(family, module):
    assert experts_module({"model_type": family}, 7) == module


def test_a_family_has_one_entry():
    for table in (EXPERTS_MODULES, DRAFT_MODULES):
        families = [family for entry in table.values() for family in entry]
        assert len(families) == len(set(families))


@pytest.mark.parametrize(
    ("family", "key", "modules"),
    [
        ("deepseek_v3", "num_nextn_predict_layers", {6: "model.layers.6.mlp.experts", 7: "model.layers.7.mlp.experts"}),
        ("glm4_moe", "num_mtp_layers", {6: "model.layers.6.mlp.experts", 7: "model.layers.7.mlp.experts"}),
        ("qwen3_5_moe_text", "mtp_num_hidden_layers", {6: "mtp.layers.0.mlp.experts", 7: "mtp.layers.1.mlp.experts"}),
        ("deepseek_v4", "num_nextn_predict_layers", {6: "mtp.0.ffn.experts", 7: "mtp.1.ffn.experts"}),
    ],
)
def test_names_of_draft_layers(family, key, modules):
    assert draft_modules(_with(model_type=family, **{key: 2})) == modules
    assert draft_layer_groups(_with(model_type=family, **{key: 0})) == ()
    assert draft_layer_groups(_with(model_type=family)) == ()


@pytest.mark.parametrize(
    ("family", "key", "layer"),
    [("deepseek_v3", "num_nextn_predict_layers", 6), ("qwen3_next", "mtp_num_hidden_layers", 6)],
)
def test_a_draft_layer_is_not_quantized_with_the_model(family, key, layer):
    config = _with(
        model_type=family, quantization_config={**NVFP4_BUT, "ignore": ["model.layers.6*", "mtp*"]}, **{key: 1}
    )
    assert _schemes(layer_groups(config)) == {(0, 1, 2, 3, 4, 5): "nvfp4"}
    assert _schemes(draft_layer_groups(config)) == {(layer,): "bf16"}
    assert _schemes(draft_layer_groups(config, dtype="fp16")) == {(layer,): "fp16"}


def test_a_quantized_draft_layer_keeps_its_scheme():
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = _with(model_type="deepseek_v3", num_nextn_predict_layers=1, quantization_config=method)
    assert _schemes(draft_layer_groups(config)) == {(6,): "fp8_block128"}


def test_tokens_of_an_unquantized_draft_layer_travel_in_bf16():
    """And those of the quantized layers in fp8, whichever is resolved first."""
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["model.layers.6"]}
    config = _with(model_type="deepseek_v3", num_nextn_predict_layers=1, quantization_config=method)
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
    assert _only_request(read_config(folder)).quant == LayerQuant.of(NVFP4)
    # The file alone says what it says.
    assert _only_request(read_config(folder / "config.json")).quant == LayerQuant.of(BF16)


def test_the_model_s_own_quantization_wins_over_a_file_beside(tmp_path):
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    content = {"quantization": {"quant_algo": "NVFP4"}}
    folder = _folder(tmp_path, config={**BASE, "quantization_config": method}, hf_quant_config=content)
    assert _only_request(read_config(folder)).quant == LayerQuant.of(FP8_BLOCK128)


def test_a_description_of_every_tensor(tmp_path):
    words = {0: ("W8A8_DYNAMIC", "W8A8_DYNAMIC"), 1: ("W4A8_DYNAMIC", "W8A8_DYNAMIC")}
    description = {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0"}
    for layer, (w13, w2) in words.items():
        for expert in range(2):
            for projection, word in (("gate", w13), ("up", w13), ("down", w2)):
                description[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"] = word
    folder = _folder(tmp_path, config=_with(num_hidden_layers=2), quant_model_description=description)
    first, second = layer_groups(read_config(folder))
    assert first.request.quant == LayerQuant.of(W8A8_INT8)
    assert second.request.quant == LayerQuant(W4A8_INT8, W8A8_INT8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": "removed"}, "none of num_experts, num_local_experts"),
        ({"num_local_experts": 9}, "contradicts itself"),
        ({"num_experts": "eight"}, "whole number"),
        ({"num_experts_per_tok": [1, 2]}, "2 entries, expected one per layer"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"mlp_layer_types": ["dense"] * 6}, "makes every layer dense"),
        ({"moe_layer_start_index": [1, 2]}, "which layers have experts is not understood"),
        ({"torch_dtype": "removed"}, "names no dtype"),
        ({"torch_dtype": "float8_e4m3fn"}, "unknown dtype of the model configuration 'float8_e4m3fn'"),
        ({"hidden_act": "quick_gelu"}, "unknown activation 'quick_gelu'"),
        ({"hidden_act": "removed"}, "none of mlp_hidden_act"),
        ({"swiglu_limit": 7.0}, "it is not known what swiglu_limit mean here"),
        ({"model_type": "step3p5"}, "its gate cannot be read"),
        ({"quantization_config": {"quant_method": "of_tomorrow"}}, r"model.layers.0.mlp.experts .*of_tomorrow"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_an_error(changes, message):
    with pytest.raises((SpecError, UnknownNameError), match=message):
        layer_groups(_with(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 1}, "'some_moe', num_nextn_predict_layers 1: where draft layers .* is not known"),
        ({"model_type": "deepseek_v3", "num_mtp_layers": "one"}, "num_mtp_layers 'one': expected whole numbers"),
    ],
    ids=str,
)
def test_draft_layers_that_are_not_understood(changes, message):
    with pytest.raises(SpecError, match=message):
        draft_layer_groups(_with(**changes))


@pytest.mark.parametrize(("content", "message"), [(b"{", "not readable as JSON"), (b"[]", "expected a JSON object")])
def test_unreadable_files(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_config(tmp_path)


def test_the_real_configuration_classes_agree(tmp_path):
    """What transformers itself builds from a written configuration is what is read from it."""
    transformers = pytest.importorskip("transformers")
    for name, (layers, sizes) in {
        "Qwen3MoeConfig": (24, (128, 8, 2048, 768)),
        "MixtralConfig": (32, (8, 2, 4096, 14336)),
        "DeepseekV3Config": (58, (256, 8, 7168, 2048)),
        "Ernie4_5_MoeConfig": (27, (64, 6, 2560, 1536)),
        "JambaConfig": (16, (16, 2, 4096, 14336)),
        "GptOssConfig": (36, (128, 4, 2880, 2880)),
    }.items():
        getattr(transformers, name)(dtype="bfloat16").save_pretrained(tmp_path)
        (group,) = layer_groups(read_config(tmp_path))
        request = group.request
        found = (request.num_experts, request.top_k, request.hidden_size, request.intermediate_size)
        assert (len(group.layers), found) == (layers, sizes), json.dumps(read_config(tmp_path))
