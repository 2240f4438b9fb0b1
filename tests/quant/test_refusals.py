"""What a configuration says and nobody understands is an error that names it, the module, and what is known."""

from __future__ import annotations

from typing import Any

import pytest
from quant_configs import CONFIGS, changed, require_refusal

from moe_core.errors import SpecError
from moe_core.quant import BF16, QuantScheme, read_layer

pytestmark = pytest.mark.error_path

EXPERTS = "model.layers.3.mlp.experts"


CT = "config_groups/group_0"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"quant_method": "of_tomorrow"},
            "quant_method 'of_tomorrow' is not read; known: auto-round, auto_round, awq, compressed-tensors, fp8",
        ),
        ({"bits": 4}, "quant_method None is not read; known"),
        ({"quant_method": "compressed_tensor"}, "is not read; did you mean 'compressed-tensors'[?]; known: auto-round"),
        ({"quant_method": "gtpq"}, "quant_method 'gtpq' is not read; did you mean 'gptq'[?]"),
        ({"quant_method": "FP-8"}, "quant_method 'FP-8' is not read; did you mean 'fp8'[?]"),
        ({"quant_method": "vptq"}, "quant_method 'vptq' is not read; known"),
        ({"quant_method": "nvfp4"}, "quant_method 'nvfp4' is not read; known"),
        # fp8
        (changed("fp8_block128", "rotation", "hadamard"), "field 'rotation' is not understood and may change numbers"),
        (changed("fp8_block128", "fmt", "e5m2"), "fmt 'e5m2' is not understood; known: absent, e4m3"),
        (changed("fp8_block128", "activation_scheme", "later"), "activation_scheme 'later' .* dynamic, static"),
        (changed("fp8_block128", "scale_fmt", "e5m0"), "scale_fmt 'e5m0' .*known: absent, float, ue8m0"),
        (changed("fp8_block128", "expert_dtype", "fp6"), "expert_dtype 'fp6'"),
        (
            changed("fp8_block128", "weight_block_size", [128]),
            r"weight_block_size to be two whole numbers, got \[128\]",
        ),
        (changed("fp8_block128", "weight_block_size", [128, True]), "weight_block_size to be two whole numbers"),
        (changed("fp8_block128", "ignored_layers", "lm_head"), "ignored_layers to be a list of names, got 'lm_head'"),
        (changed("mxfp8", "weight_block_size", [1, 64]), r"mxfp8 has weight_block_size \[1, 32\], got \[1, 64\]"),
        (changed("mxfp8", "moe_quant_algo", "NVFP4"), "field 'moe_quant_algo'"),
        (changed("mxfp4_gpt_oss", "group_size", 16), "field 'group_size'"),
        # compressed-tensors
        (changed("ct_w8a8_int8", "config_groups", {"W8A8": ["Linear"]}), "config_groups to be groups of arguments"),
        (changed("ct_w8a8_int8", "format", "marlin-24"), "format 'marlin-24' .*known: pack-quantized, int-quantized"),
        (changed("ct_w8a8_int8", "format", "dense"), "format 'dense'"),
        (changed("ct_w8a8_int8", "format", "float-quantized"), "format 'float-quantized' does not hold w8a8_int8"),
        (changed("ct_mxfp4", "format", "nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' does not hold mxfp4"),
        (changed("ct_w8a8_int8", "quantization_status", "calibration"), "quantization_status 'calibration'"),
        (changed("ct_w8a8_int8", "transform_config", {"u": {}}), "transform_config is not understood"),
        (changed("ct_w8a8_int8", "sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config"),
        (changed("ct_w8a8_int8", f"{CT}/output_activations", {"num_bits": 8}), "output_activations"),
        (changed("ct_w8a8_int8", f"{CT}/weights", None), "quantizes activations and not weights"),
        (changed("ct_w8a8_int8", f"{CT}/weights", "int8"), "expected fields with values, got 'int8'"),
        (changed("ct_w8a8_int8", f"{CT}/weights/num_bits", 6), "int of 6 bits is not understood; known: int of 4"),
        (changed("ct_w8a8_int8", f"{CT}/weights/type", "nf"), "nf of 8 bits"),
        (changed("ct_w8a8_int8", f"{CT}/weights/strategy", "attn_head"), "strategy 'attn_head' .*tensor, channel"),
        (changed("ct_w8a8_int8", f"{CT}/weights/dynamic", True), "dynamic True"),
        (changed("ct_w8a8_int8", f"{CT}/weights/smooth", 0.5), "field 'smooth'"),
        (changed("ct_w8a8_int8", f"{CT}/weights/symmetric", False), "zero points in format 'int-quantized'"),
        (changed("ct_w8a8_int8", f"{CT}/input_activations/symmetric", False), "symmetric False"),
        (changed("ct_w8a8_int8", f"{CT}/input_activations/strategy", "channel"), "strategy 'channel'"),
        (changed("ct_w8a8_int8", f"{CT}/input_activations/dynamic", False), "strategy 'token' with dynamic False"),
        (changed("ct_nvfp4", f"{CT}/input_activations/dynamic", True), "dynamic True is not understood"),
        (changed("ct_w4a16_g128", f"{CT}/weights/actorder", "group"), "actorder 'group'"),
        (changed("ct_fp8_block", f"{CT}/weights/block_structure", [-1, 128]), r"rows and columns, got \[-1, 128\]"),
        (changed("ct_fp8_block", f"{CT}/weights/block_structure", "128x0"), "rows and columns, got '128x0'"),
        (changed("ct_fp8_block", f"{CT}/weights/block_structure", None), "rows and columns, got None"),
        (changed("ct_w4a16_g128", f"{CT}/weights/group_size", None), "group_size to be a whole number, got None"),
        (changed("ct_w4a16_g128", f"{CT}/weights/scale_dtype", "torch.int8"), "scale_dtype 'torch.int8'"),
        (changed("ct_fp8_block", f"{CT}/weights/block_structure", [128]), "block_structure to be rows and columns"),
        (changed("ct_w8a8_int8", f"{CT}/targets", ["Router"]), "target class 'Router' means experts is not known"),
        (
            changed("ct_w8a8_int8", "config_groups/group_1", CONFIGS["ct_w4a8_int8"]["config_groups"]["group_0"]),
            "config_groups group_0, group_1 target it alike and differ",
        ),
        (changed("ct_w8a8_int8", f"{CT}/weights/num_bits", [8]), r"num_bits to be a whole number, got \[8\]"),
        (changed("ct_w8a8_int8", f"{CT}/weights/symmetric", 1), "symmetric 1 is not understood"),
        (changed("ct_fp8_block", f"{CT}/input_activations/group_size", 0), "group_size of strategy 'group' .* got 0"),
        (
            changed("ct_nvfp4", f"{CT}/input_activations/group_size", 0),
            "group_size of strategy 'tensor_group' .* got 0",
        ),
        (changed("ct_w4a16_g128", f"{CT}/weights/group_size", 0), "group_size of strategy 'group' .* got 0"),
        (changed("ct_w8a8_int8", "config_groups", {}), "expected config_groups to be groups of arguments, got {}"),
        (changed("ct_w8a8_int8", "config_groups", None), "expected config_groups to be groups of arguments, got None"),
        (changed("ct_w8a8_int8", f"{CT}/targets", []), r"config_groups group_0: expected targets, got \[\]"),
        (changed("ct_w8a8_int8", f"{CT}/targets", [""]), r"targets to be a list of names, got \[''\]"),
        (changed("ct_w8a8_int8", f"{CT}/targets", "Linear"), "targets to be a list of names, got 'Linear'"),
        (changed("ct_w8a8_int8", "ignore", False), "ignore to be a list of names, got False"),
        # modelopt
        (changed("modelopt_nvfp4", "quant_algo", "NVFP4_SVD"), "quant_algo 'NVFP4_SVD' is not read; known: FP8"),
        (changed("modelopt_nvfp4", "group_size", 32), "quant_algo NVFP4 has group_size 16, got 32"),
        (changed("modelopt_nvfp4", f"{CT}/weights/group_size", 32), "quant_algo NVFP4 has group_size 16, got 32"),
        (changed("modelopt_nvfp4", "pre_quant_scale", True), "NVFP4 with pre_quant_scale is not read"),
        (changed("modelopt_nvfp4", "lora_rank", 32), "field 'lora_rank'"),
        (changed("modelopt_file_nvfp4", "quantization/lora_rank", 32), "field 'lora_rank'"),
        (changed("modelopt_file_nvfp4", "more", 1), "field 'more'"),
        (changed("modelopt_mixed", "quantized_layers", None), "MIXED_PRECISION to come with quantized_layers"),
        (
            changed("modelopt_mixed", "quantized_layers", {EXPERTS: {"quant_algo": "NVFP4", "encoding": "csf"}}),
            "field 'encoding'",
        ),
        *(
            (changed("modelopt_nvfp4", "quant_algo", value), "quant_algo.*(got none|to be text)")
            for value in (None, 0, False, [])
        ),
        (
            {"quant_method": "modelopt"},
            "expected quant_algo, got none; known: FP8, .*MIXED_PRECISION, UNQUANTIZED, NONE",
        ),
        (
            changed("modelopt_mixed", "quantized_layers", {EXPERTS: {"group_size": 16}}),
            "expected quant_algo, got none",
        ),
        (
            changed("modelopt_nvfp4", "quant_algo", "NONE"),
            "quant_algo NONE and config_groups group_0 weights of 4 bits",
        ),
        (
            changed("modelopt_nvfp4", f"{CT}/weights", {"num_bits": 8, "type": "int"}),
            "quant_algo NVFP4 and config_groups group_0 weights of 8 bits, int, contradict",
        ),
        (
            changed("modelopt_nvfp4", "quant_algo", "W4A16_NVFP4"),
            "quant_algo W4A16_NVFP4 and config_groups group_0 input_activations of 4 bits, float, contradict",
        ),
        (
            changed("modelopt_fp8", "weights", {"num_bits": 4}),
            "quant_algo FP8 and weights of 4 bits, None, contradict",
        ),
        (
            changed("modelopt_fp8", "quant_method", "modelopt_fp4"),
            "quant_method modelopt_fp4 and quant_algo FP8 contra",
        ),
        (changed("modelopt_nvfp4", "quant_method", "modelopt_fp8"), "quant_method modelopt_fp8 and quant_algo NVFP4"),
        (
            changed("modelopt_nvfp4", "quant_method", "modelopt_mixed"),
            "quant_method modelopt_mixed and quant_algo NVF",
        ),
        (changed("modelopt_mixed", "quant_method", "modelopt_fp4"), "modelopt_fp4 and quant_algo MIXED_PRECISION"),
        (
            changed("modelopt_file_mxfp8", "quant_method", "modelopt_fp4"),
            "quant_method modelopt_fp4 and quant_algo MXF",
        ),
        (
            changed("modelopt_nvfp4", "quantized_layers", {EXPERTS: {"quant_algo": "FP8"}}),
            "quant_algo NVFP4 and quantized_layers contradict each other",
        ),
        (changed("modelopt_mixed", "quantized_layers", {}), "MIXED_PRECISION to come with quantized_layers, got {}"),
        (
            changed("modelopt_nvfp4", "config_groups", ["fp4"]),
            r"config_groups to be groups of arguments, got \['fp4'\]",
        ),
        (changed("modelopt_nvfp4", "weights", "fp4"), "expected weights to be fields, got 'fp4'"),
        # gptq and awq
        (changed("gptq_g128", "bits", 3), "bits 3 is not understood; known: 4, 8"),
        (changed("awq_g128", "bits", 8), "bits 8 is not understood; known: 4"),
        (changed("gptq_g128", "desc_act", True), r"desc_act: groups are not of neighbouring channels \(g_idx\)"),
        (changed("gptq_g128", "checkpoint_format", "marlin"), "checkpoint_format 'marlin' .*absent, gptq, gptq_v2"),
        (changed("gptq_g128", "pack_dtype", "int8"), "pack_dtype 'int8'"),
        (changed("gptq_g128", "group_size", "128"), "group_size to be a whole number"),
        (changed("gptq_g128", "dynamic", [".*"]), "dynamic to be patterns with fields"),
        (changed("gptq_g128", "dynamic", {".*": {"adapter": 1}}), "field 'adapter'"),
        (
            changed("gptq_g128", "modules_in_block_to_quantize", 5),
            "modules_in_block_to_quantize to be a list .* got 5",
        ),
        (
            changed("gptq_g128", "modules_in_block_to_quantize", [5]),
            "modules_in_block_to_quantize to be a list .* got 5",
        ),
        (changed("gptq_g128", "modules_in_block_to_quantize", "mlp"), "modules_in_block_to_quantize .* got 'mlp'"),
        (changed("gptq_g128", "modules_in_block_to_quantize", []), r"modules_in_block_to_quantize .* got \[\]"),
        (
            changed("gptq_g128", "format", "gptq_v2"),
            "checkpoint_format 'gptq' and format 'gptq_v2' contradict each other",
        ),
        (changed("gptq_g128", "dynamic", {1: {}}), "dynamic to be patterns with fields, got {1: {}}"),
        ({**CONFIGS["gptq_g128"], 1: "a", "a": 1}, "field 1, 'a' is not understood"),
        ({**CONFIGS["modelslim_description"], 1: "a"}, "field 1 is not understood"),
        (changed("awq_g128", "version", "gemv"), "version 'gemv' is not understood; known: absent, gemm"),
        (changed("awq_g128", "zero_point", "yes"), "zero_point 'yes' is not understood; known: absent, True, False"),
        # modelslim
        (changed("modelslim_description", f"{EXPERTS}.0.up_proj.weight", "W8A8"), "experts or names disagree"),
        ({"model_quant_type": "W8A8", "a.weight": "FLOAT"}, "the description names no such weight; add its tensors"),
        ({"model_quant_type": "W8A8", "surprise": 1}, "field 'surprise'"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_what_is_not_understood(config: dict[str, Any], match: str) -> None:
    require_refusal(config, EXPERTS, match)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("model.layers.1.mlp.experts.{}.{}.weight", "W8A8", "word 'W8A8' is not understood; known: W8A8_DYNAMIC"),
        ("version", "2.0.0", "version '2.0.0'"),
        ("group_size", 256, "W4A8_DYNAMIC in groups of 256 is not read"),
    ],
)
def test_descriptions_of_w4a8(field: str, value: Any, match: str) -> None:
    changes = {field.format(e, p): value for e in range(3) for p in ("gate_proj", "up_proj", "down_proj")}
    with pytest.raises(SpecError, match=match):
        read_layer(CONFIGS["modelslim_description"] | changes, "model.layers.1.mlp.experts")


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("fp8_block128", "rotation", None),
        ("fp8_block128", "kv_cache_scheme", {"num_bits": 8}),
        ("ct_w8a8_int8", "sparsity_config", {"format": "dense"}),
        ("ct_w8a8_int8", "kv_cache_scheme", {"num_bits": 8}),
        ("ct_w8a8_int8", f"{CT}/weights/observer", "mse"),
        ("ct_w4a16_g128", f"{CT}/weights/scale_dtype", "torch.bfloat16"),
        ("modelopt_nvfp4", "group_size", 16),
        ("modelslim_description", "kv_quant_type", "C8"),
        ("gptq_g128", "damp_percent", 0.1),
        ("gptq_v2_asym", "desc_act", False),
        # transformers writes it for AWQ whatever the zero points are.
        ("awq_g128", "sym", True),
        ("modelopt_nvfp4", "modules_to_not_convert", ["model.layers.*.self_attn"]),
        ("awq_sym_g64", "bits", None),
        ("awq_sym_g64", "group_size", None),
        ("gptq_g128", "format", "gptq"),
        ("gptq_g128", "sym", None),
        ("modelopt_nvfp4", "quant_method", "modelopt_fp4"),
        ("modelopt_nvfp4", "quantized_layers", {}),
        ("ct_w8a8_int8", f"{CT}/weights/num_bits", None),
    ],
)
def test_fields_that_change_no_numbers(name: str, path: str, value: Any) -> None:
    assert read_layer(changed(name, path, value), EXPERTS) == read_layer(CONFIGS[name], EXPERTS)


def test_unquantized_weights_have_a_dtype_of_layers() -> None:
    with pytest.raises(SpecError, match=r"field 'dtype': 'nvfp4' is not one of fp32, bf16, fp16"):
        QuantScheme.from_hf(None, EXPERTS, "nvfp4")


def test_an_algorithm_that_says_none() -> None:
    """Excluded modules need no algorithm that is read, and one that quantizes nothing says so."""
    assert QuantScheme.from_hf({"quant_method": "modelopt", "quant_algo": "NONE"}, EXPERTS) == BF16
    left = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "ignore": ["*.experts*"]}
    assert QuantScheme.from_hf(left, EXPERTS) == BF16
