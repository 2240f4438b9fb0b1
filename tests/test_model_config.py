"""Model configurations of many families: sizes, activations, and what is refused."""

from __future__ import annotations

import json

import pytest
from model_configs import BASE, changed, only_request

from moe_core.activation import GEGLU_TANH, RELU2, SWIGLU, SWIGLU_OAI, ActivationSpec
from moe_core.errors import SpecError, UnknownNameError
from moe_core.model_config import layer_groups, read_config
from moe_core.quant import FP8_BLOCK128

pytestmark = pytest.mark.error_path


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_names_of_the_number_of_experts(name):
    assert only_request(changed(**{"num_experts": "removed", name: 12})).num_experts == 12


@pytest.mark.parametrize("name", ["num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k"])
def test_names_of_top_k(name):
    assert only_request(changed(**{"num_experts_per_tok": "removed", name: 5})).top_k == 5


def test_the_experts_own_intermediate_size_wins():
    assert only_request(BASE).intermediate_size == 256
    assert only_request(changed(moe_intermediate_size="removed")).intermediate_size == 512


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_the_width_of_dense_layers_is_not_that_of_experts(family):
    # As a configuration written by hand may lack it; the model would have the default of its class.
    with pytest.raises(SpecError, match=f"{family}.*no moe_intermediate_size.*that of dense layers"):
        only_request(changed(model_type=family, moe_intermediate_size="removed"))
    assert only_request(changed(model_type=family)).intermediate_size == 256


def test_a_model_without_experts_is_told_so_whatever_else_is_missing():
    with pytest.raises(SpecError, match="is it an MoE model"):
        only_request({"model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2})


@pytest.mark.parametrize("name", ["moe_latent_size", "moe_hidden_size", "routed_expert_hidden_size"])
def test_the_width_of_experts_that_see_less_than_the_model(name):
    assert only_request(BASE).hidden_size != 48
    assert only_request(changed(**{name: 48})).hidden_size == 48


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
    assert only_request(changed(**changes)).activation == activation


def test_traits_that_only_the_family_tells():
    assert only_request(changed(model_type="gpt_oss")).bias
    assert only_request(changed(model_type="llama4_text")).weight_on_input
    assert only_request(changed(model_type="muse_spark_text")).post_norm


def test_the_text_part_of_a_larger_model_is_read():
    nested = {"model_type": "omni", "thinker_config": {"text_config": BASE}, "hidden_size": 1}
    assert only_request(nested).hidden_size == 64


def test_sizes_per_layer_make_groups():
    first, second = layer_groups(changed(moe_topk=[1, 1, 2, 2, 1, 1], num_experts_per_tok="removed"))
    assert (first.layers, first.request.top_k) == ((0, 1, 4, 5), 1)
    assert (second.layers, second.request.top_k) == ((2, 3), 2)


def test_dtype_and_scheme_can_be_given():
    assert only_request(changed(dtype="float16", torch_dtype="removed")).dtype == "fp16"
    request = only_request(changed(torch_dtype="removed"), dtype="bf16", quant=FP8_BLOCK128)
    assert (request.dtype, request.quant.w2) == ("bf16", FP8_BLOCK128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": "removed"}, "none of num_experts, num_local_experts"),
        ({"num_local_experts": 9}, "contradicts itself"),
        ({"num_experts": "eight"}, "whole number"),
        ({"num_experts_per_tok": [1, 2]}, "2 entries, expected one per layer"),
        ({"num_hidden_layers": None}, "num_hidden_layers is null"),
        ({"num_hidden_layers": 10**11}, "num_hidden_layers is 100000000000, expected 1 to 4096 layers"),
        ({"num_experts": True}, "whole number >= 1, got true"),
        ({"quantization_config": "\x1b"}, r'expected fields with values or none, got "\\u001b"'),
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
        layer_groups(changed(**changes))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not readable as JSON"), (b"[]", "expected a JSON object, got a list"), (b"null", "object, got null")],
)
def test_unreadable_files(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_config(tmp_path)


def test_a_file_with_a_mark_of_the_byte_order_and_a_repeated_key(tmp_path):
    """As the models' own tools read it."""
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2}', encoding="utf-8-sig")
    assert read_config(tmp_path) == {"a": 2}


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
