"""A small configuration of every layout in use: which scheme and which storage its experts have, layer by layer."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from quant_configs import CONFIGS

from moe_core.quant import PER_TENSOR, SCHEMES, STORAGES, QuantScheme, StoredLayer, StoredScheme, read_layer

LAYER = "model.layers.{}.mlp.experts"
MTP = "mtp.layers.{}.mlp.experts"


def _stored(scheme: QuantScheme | str, storage: str) -> StoredScheme:
    return StoredScheme(SCHEMES[scheme] if isinstance(scheme, str) else scheme, storage)


def _alike(scheme: QuantScheme | str, storage: str) -> StoredLayer:
    stored = _stored(scheme, storage)
    return StoredLayer(stored, stored)


PLAIN = _alike("bf16", "plain")
PACKED, CT_NVFP4, CT_MXFP4 = "compressed_tensors_packed", "compressed_tensors_nvfp4", "compressed_tensors_mxfp4"
NVFP4 = _alike("nvfp4", "modelopt_nvfp4")

STATIC_FP8 = {
    "activation_dtype": "fp8",
    "activation_scaling": "static",
    "activation_group": PER_TENSOR,
    "activation_scale": "fp32",
}
INT8_G32 = QuantScheme(weight_dtype="int8", weight_block=(1, 32), weight_scale="fp32")
INT8_ASYM_G128 = attrs.evolve(SCHEMES["w8a16_int8_g128"], zero_point=True)
FP8_CHANNEL_STATIC = attrs.evolve(SCHEMES["fp8_channel_w8a16"], **STATIC_FP8)
MXFP4_FP8_STATIC = attrs.evolve(SCHEMES["mxfp4_w4a16"], **STATIC_FP8)
INT8_TENSOR_STATIC = attrs.evolve(SCHEMES["fp8_tensor_static"], weight_dtype="int8", activation_dtype="int8")
INT4_FP8 = attrs.evolve(SCHEMES["w4a16_int4"], global_scale=True, **{**STATIC_FP8, "activation_scaling": "dynamic"})

#: Configuration -> module name, its number, and what is expected.
EXPECTED: dict[str, list[tuple[str, int, StoredLayer]]] = {
    "fp8_block128": [(LAYER, 0, _alike("fp8_block128", "scaled")), (MTP, 0, _alike("fp8_block128", "scaled"))],
    "fp8_block128_ue8m0": [(LAYER, 61, _alike("fp8_block128_ue8m0", "scaled"))],
    "fp8_fp4_experts": [("layers.{}.ffn.experts", 4, _alike("mxfp4_w4a8_g128", "packed_fp4"))],
    "fp8_tensor_static": [("model.layers.{}.block_sparse_moe.experts", 0, _alike("fp8_tensor_static", "scaled"))],
    "fp8_tensor_dynamic": [(LAYER, 0, _alike("fp8_tensor", "scaled"))],
    "mxfp8": [("model.layers.{}.block_sparse_moe.experts", 3, _alike("mxfp8", "scaled"))],
    "mxfp4_gpt_oss": [(LAYER, 5, _alike("mxfp4_w4a16", "gpt_oss_mxfp4"))],
    "ct_w8a8_int8": [(LAYER, 1, _alike("w8a8_int8", "scaled"))],
    "ct_w4a8_int8": [(LAYER, 1, _alike("w4a8_int8", "scaled"))],
    "ct_fp8_dynamic": [(LAYER, 1, _alike("fp8_channel", "scaled"))],
    "ct_fp8_static": [(LAYER, 1, _alike("fp8_tensor_static", "scaled"))],
    "ct_fp8_block": [(LAYER, 1, _alike("fp8_block128", "scaled"))],
    "ct_fp8_weight_only": [(LAYER, 1, _alike("fp8_channel_w8a16", "scaled"))],
    "ct_w4a16_g128": [(LAYER, 1, _alike("w4a16_int4_g128", PACKED))],
    "ct_w4a16_g32": [(LAYER, 1, _alike("w4a16_int4_g32", PACKED))],
    "ct_w4a16_asym_g128": [(LAYER, 1, _alike("w4a16_int4_asym_g128", PACKED))],
    "ct_w4a16_channel": [(LAYER, 1, _alike("w4a16_int4", PACKED))],
    "ct_w8a16": [(LAYER, 1, _alike("w8a16_int8", PACKED))],
    "ct_w4afp8": [(LAYER, 1, _alike("w4a8_fp8_g128", PACKED))],
    "ct_nvfp4": [(LAYER, 1, _alike("nvfp4", CT_NVFP4))],
    "ct_nvfp4a16": [(LAYER, 1, _alike("nvfp4_w4a16", CT_NVFP4))],
    "ct_mxfp4": [(LAYER, 1, _alike("mxfp4", CT_MXFP4))],
    "ct_mxfp4a16": [(LAYER, 1, _alike("mxfp4_w4a16", CT_MXFP4))],
    "ct_mxfp8": [(LAYER, 1, _alike("mxfp8", "scaled"))],
    "ct_mixed": [
        (LAYER, 3, _alike("nvfp4", CT_NVFP4)),
        ("model.language_model.layers.{}.mlp.experts", 44, _alike("nvfp4", CT_NVFP4)),
        (LAYER, 45, _alike("fp8_channel", "scaled")),
        # The class Linear, which is the least telling of the targets.
        (LAYER, 2, _alike("fp8_channel", "scaled")),
    ],
    "modelopt_fp8": [(LAYER, 1, _alike("fp8_tensor_static", "scaled")), (LAYER, 0, PLAIN)],
    "modelopt_nvfp4": [(LAYER, 1, NVFP4), (LAYER, 61, PLAIN), (LAYER, 6, NVFP4)],
    "modelopt_file_nvfp4": [(LAYER, 60, NVFP4), (LAYER, 61, PLAIN), (MTP, 0, PLAIN)],
    "modelopt_file_w4a16_nvfp4": [(LAYER, 1, _alike("nvfp4_w4a16", "modelopt_nvfp4"))],
    "modelopt_file_fp8_pb_wo": [(LAYER, 1, _alike("fp8_block128_w8a16", "scaled"))],
    "modelopt_file_fp8_per_channel": [(LAYER, 1, _alike("fp8_channel", "scaled"))],
    "modelopt_file_mxfp8": [(LAYER, 1, _alike("mxfp8", "scaled"))],
    "modelopt_mixed": [
        ("model.language_model.layers.{}.mlp.experts", 1, NVFP4),
        (LAYER, 1, NVFP4),
        (LAYER, 2, PLAIN),
        (MTP, 0, _alike("fp8_block128", "scaled")),
    ],
    "gptq_g128": [
        (LAYER, 1, _alike("w4a16_int4_g128", "gptq")),
        (LAYER, 2, StoredLayer(_stored("w4a16_int4_g128", "gptq"), _stored("w4a16_int4_g32", "gptq"))),
        (MTP, 0, PLAIN),
    ],
    "gptq_8bit": [
        (LAYER, 1, _alike("w8a16_int8_g128", "gptq")),
        (LAYER, 2, StoredLayer(_stored("w8a16_int8_g128", "gptq"), _stored("w4a16_int4_g128", "gptq"))),
    ],
    "gptq_v2_asym": [(LAYER, 1, _alike(attrs.evolve(SCHEMES["w4a16_int4"], zero_point=True), "gptq_v2"))],
    "awq_g128": [
        (LAYER, 1, _alike("w4a16_int4_asym_g128", "awq")),
        (LAYER, 0, PLAIN),
        # layers.0 of the text part is another layer than layers.0 of the draft model.
        ("draft.layers.{}.mlp.experts", 0, _alike("w4a16_int4_asym_g128", "awq")),
        (MTP, 0, PLAIN),
    ],
    "awq_sym_g64": [("model.layers.{}.block_sparse_moe.experts", 0, _alike("w4a16_int4_g64", "awq"))],
    "auto_round_gptq": [
        (LAYER, 1, _alike("w4a16_int4_g128", "gptq")),
        (LAYER, 2, StoredLayer(_stored("w4a16_int4_g128", "gptq"), _stored(INT8_G32, "gptq"))),
        (LAYER, 3, PLAIN),
        (LAYER, 4, _alike("w8a16_int8_g128", "gptq")),
        (MTP, 0, PLAIN),
    ],
    "auto_round_asym": [
        ("model.language_model.layers.{}.mlp.experts", 1, _alike("w4a16_int4_asym_g128", "gptq_v2")),
        (LAYER, 1, _alike("w4a16_int4_asym_g128", "gptq_v2")),
        ("model.visual.blocks.{}.mlp.experts", 1, PLAIN),
    ],
    "auto_round_awq_in_backend": [(LAYER, 1, _alike("w4a16_int4_asym_g128", "awq"))],
    # Writers that subtracted one from zero points and said that they had not.
    "auto_round_model_free_0_15": [(LAYER, 1, _alike("w4a16_int4_asym_g128", "gptq"))],
    "auto_round_model_free_mixed": [
        (LAYER, 1, StoredLayer(_stored("w4a16_int4_g128", "gptq"), _stored(INT8_ASYM_G128, "gptq_v2")))
    ],
    "auto_round_as_gptq": [
        (LAYER, 0, _alike("w4a16_int4_g128", "gptq")),
        (LAYER, 1, _alike(INT8_G32, "gptq")),
    ],
    "auto_round_as_awq": [(LAYER, 1, _alike("w4a16_int4_asym_g128", "awq"))],
    "auto_round_mxfp4": [(LAYER, 1, _alike("mxfp4", CT_MXFP4))],
    "auto_round_mxfp8": [(LAYER, 1, _alike("mxfp8", "scaled"))],
    "auto_round_nvfp4": [(LAYER, 1, _alike("nvfp4", CT_NVFP4))],
    "auto_round_fp8_static": [(LAYER, 1, _alike(FP8_CHANNEL_STATIC, "scaled"))],
    "auto_round_fp8_block": [(LAYER, 1, _alike("fp8_block128", "scaled"))],
    "auto_round_fp8_weight_only": [(LAYER, 1, _alike("fp8_tensor_w8a16", "scaled"))],
    "quark_fp8_static": [(LAYER, 1, _alike("fp8_tensor_static", "scaled"))],
    "quark_fp8_first_keys": [(LAYER, 1, _alike("fp8_tensor_w8a16", "scaled"))],
    "quark_ptpc_fp8": [(LAYER, 1, _alike("fp8_channel", "scaled")), (LAYER, 5, PLAIN)],
    "quark_fp8_block": [(LAYER, 1, _alike("fp8_block128", "scaled"))],
    "quark_mxfp4": [
        (LAYER, 1, _alike("mxfp4", "packed_fp4")),
        (LAYER, 2, StoredLayer(_stored("mxfp4", "packed_fp4"), _stored("fp8_channel", "scaled"))),
        (LAYER, 3, _alike("w8a8_int8", "scaled")),
        (LAYER, 4, PLAIN),
        (MTP, 0, _alike("mxfp4", "packed_fp4")),
    ],
    "quark_mxfp4_fp8": [(LAYER, 1, _alike(MXFP4_FP8_STATIC, "packed_fp4"))],
    "quark_int8": [(LAYER, 1, _alike("w8a8_int8", "scaled"))],
    "quark_int8_static": [(LAYER, 1, _alike(INT8_TENSOR_STATIC, "scaled"))],
    "quark_int4": [(LAYER, 1, _alike("w4a16_int4_g128", "quark_int4"))],
    "quark_uint4": [(LAYER, 1, _alike("w4a16_int4_asym_g128", "quark_uint4"))],
    "quark_int4_channel": [(LAYER, 1, _alike("w4a16_int4", "quark_int4_channel"))],
    "quark_uint4_channel": [
        (LAYER, 1, _alike(attrs.evolve(SCHEMES["w4a16_int4"], zero_point=True), "quark_uint4_channel"))
    ],
    "quark_int4_fp8": [(LAYER, 1, _alike(INT4_FP8, "quark_int4_fp8"))],
    "quark_as_awq": [(LAYER, 1, _alike("w4a16_int4_asym_g128", "awq"))],
    "quark_as_awq_symmetric": [(LAYER, 1, _alike("w4a16_int4_g128", "quark_int4"))],
    "quark_as_fp8": [(LAYER, 1, _alike("fp8_tensor_w8a16", "scaled"))],
    "quark_nvfp4": [(LAYER, 1, _alike("nvfp4", "quark_nvfp4"))],
    "modelslim_description": [
        (LAYER, 0, _alike("w8a8_int8", "modelslim_w8a8")),
        (LAYER, 1, _alike("w4a8_int8", "modelslim_w4a8")),
        (LAYER, 2, StoredLayer(_stored("w4a4_int4", "modelslim_w4a4"), _stored("w8a8_int8", "modelslim_w8a8"))),
        (LAYER, 3, PLAIN),
        (LAYER, 4, _alike("mxfp8", "scaled")),
        (LAYER, 5, _alike("mxfp4_w4a8", "packed_fp4")),
    ],
}
NOT_GATED = {"modelopt_file_mixed_per_expert": [("backbone.layers.{}.mixer.experts", 1, NVFP4)]}
CASES = [(name, *case) for name, cases in EXPECTED.items() for case in cases]


def test_every_example_is_expected() -> None:
    assert {*EXPECTED, *NOT_GATED} == set(CONFIGS)


@pytest.mark.parametrize(("name", "module", "layer", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_examples(name: str, module: str, layer: int, expected: StoredLayer) -> None:
    assert read_layer(CONFIGS[name], module.format(layer), "bf16") == expected


@pytest.mark.parametrize(("name", "module", "layer", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_the_public_door_says_the_same_of_single_projections(
    name: str, module: str, layer: int, expected: StoredLayer
) -> None:
    experts = module.format(layer)
    for projection, stored in {
        "gate_proj": expected.w13,
        "7.up_proj": expected.w13,
        "0.w1": expected.w13,
        "gate_up_proj": expected.w13,
        "down_proj": expected.w2,
        "w2": expected.w2,
    }.items():
        assert QuantScheme.from_hf(CONFIGS[name], f"{experts}.{projection}", "bf16") == stored.scheme


@pytest.mark.parametrize("name", NOT_GATED)
def test_examples_without_gate(name: str) -> None:
    for module, layer, expected in NOT_GATED[name]:
        assert read_layer(CONFIGS[name], module.format(layer), gated=False) == expected
        assert QuantScheme.from_hf(CONFIGS[name], module.format(layer) + ".up_proj") == expected.w13.scheme


def test_every_storage_has_an_example() -> None:
    found = {stored.storage for *_, layer in CASES for stored in (layer.w13, layer.w2)}
    assert found == set(STORAGES)


@pytest.mark.parametrize(("config", "dtype"), [(None, "bf16"), ({}, "fp16")])
def test_a_checkpoint_without_configuration_is_unquantized(config: dict[str, Any] | None, dtype: str) -> None:
    assert QuantScheme.from_hf(config, "model.layers.0.mlp.experts", dtype).label == dtype


def test_the_dtype_of_modules_that_are_left_alone_is_the_layers() -> None:
    assert QuantScheme.from_hf(CONFIGS["modelopt_nvfp4"], "model.layers.61.mlp.experts", "fp16") == SCHEMES["fp16"]


def test_activations_are_grouped_as_wide_as_the_blocks_of_weights() -> None:
    wide = QuantScheme.from_hf({"quant_method": "fp8", "weight_block_size": [64, 128]}, "model.layers.0.mlp.experts")
    assert (wide.weight_block, wide.activation_group) == ((64, 128), 128)


def test_without_a_module_the_rules_for_the_whole_model_answer() -> None:
    assert QuantScheme.from_hf(CONFIGS["ct_w8a8_int8"]) == SCHEMES["w8a8_int8"]
    assert QuantScheme.from_hf(CONFIGS["fp8_block128"]) == SCHEMES["fp8_block128"]


def test_schemes_of_a_stored_layer() -> None:
    mixed = read_layer(CONFIGS["modelslim_description"], "model.layers.2.mlp.experts")
    assert str(mixed.quant) == "w4a4_int4/w8a8_int8"
