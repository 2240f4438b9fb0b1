"""AutoRound's configurations: who wrote zero points how, which layer an entry means, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from quant_configs import CONFIGS, changed, require_refusal

from moe_core.errors import SpecError
from moe_core.quant import SCHEMES, read_layer

EXPERTS = "model.layers.7.mlp.experts"


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("config", "match"),
    [
        (changed("auto_round_gptq", "bits", 3), "bits 3 is not understood; known: 4, 8"),
        (changed("auto_round_gptq", "bits", None), "expected bits to be a whole number, got None"),
        (changed("auto_round_gptq", "group_size", 0), "group_size of integers to be positive or -1, got 0"),
        (
            changed("auto_round_gptq", "data_type", "mx_int"),
            "data_type 'mx_int' is not understood; known: absent, int",
        ),
        (changed("auto_round_gptq", "packing_format", "auto_round:qbits"), "packing_format 'auto_round:qbits' .*gptq"),
        (changed("auto_round_gptq", "packing_format", "mlx"), "packing_format 'mlx' of integers is not read"),
        (changed("auto_round_gptq", "packing_format", "auto_round:gptq:awq"), "packing_format 'auto_round:gptq:awq'"),
        (changed("auto_round_gptq", "packing_format", "auto_round:llm_compressor"), "packing_format .* of integers"),
        (changed("auto_round_gptq", "act_bits", 8), "int weights with act_bits 8 are not read"),
        (changed("auto_round_gptq", "super_bits", 6), "super_bits 6 changes numbers and is not read"),
        (changed("auto_round_gptq", "rotation_config", {"block_size": 32}), "rotation_config .* is not read"),
        (
            changed("auto_round_gptq", "block_name_to_quantize", 3),
            "block_name_to_quantize to be names of blocks, got 3",
        ),
        (changed("auto_round_gptq", "smooth", 0.5), "field 'smooth'"),
        (changed("auto_round_gptq", "extra_config", {".*experts.*": {"smooth": 1}}), "field 'smooth'"),
        (
            changed("auto_round_gptq", "extra_config", {".*experts.*": 16}),
            "extra_config to be layers with fields, got 16",
        ),
        (changed("auto_round_gptq", "extra_config", {".*experts(": {"bits": 16}}), "is not a regular expression"),
        (
            changed("auto_round_gptq", "extra_config", {".*experts.*": {"bits": 16, "act_bits": 8}}),
            "quantizes activations and not weights",
        ),
        (
            changed("auto_round_gptq", "extra_config", {r".*experts\.[0-3]\..*": {"bits": 16}}),
            "names expert 0, 1, 2, 3 and not expert",
        ),
        (
            changed("auto_round_gptq", "extra_config", {".*experts.*": {"bits": 8}, "mlp.experts": {"bits": 16}}),
            r"extra_config: '\.\*experts\.\*' and 'mlp\.experts' both mean it and differ",
        ),
        (changed("auto_round_awq_in_backend", "bits", 8), "packing_format of awq is read with 4 bits"),
        (
            changed("auto_round_model_free_0_15", "autoround_version", None),
            "stored less one follows from autoround_ver",
        ),
        (changed("auto_round_mxfp4", "group_size", 16), "group_size 16 is not understood; known: 32"),
        (changed("auto_round_mxfp4", "bits", 6), "bits 6 is not understood; known: 4, 8"),
        (changed("auto_round_mxfp4", "act_dynamic", False), "act_dynamic False"),
        (changed("auto_round_mxfp4", "act_data_type", "fp"), "act_data_type 'fp'"),
        (
            changed("auto_round_mxfp4", "packing_format", "auto_round:auto_gptq"),
            "packing_format 'auto_round:auto_gptq'",
        ),
        (changed("auto_round_nvfp4", "act_data_type", "nv_fp4"), "act_data_type 'nv_fp4' .*nv_fp4_with_static_gs"),
        (changed("auto_round_nvfp4", "data_type", "nvfp4_v2"), "data_type 'nvfp4_v2'"),
        (changed("auto_round_fp8_static", "fmt", "e5m2"), "fmt 'e5m2'"),
        (changed("auto_round_fp8_static", "group_size", 128), "group_size 128 is not understood; known: -1, 0"),
        (changed("auto_round_fp8_static", "act_group_size", 128), "act_group_size 128"),
        (changed("auto_round_fp8_static", "activation_scheme", "dynamic"), "act_dynamic False and activation_scheme"),
        (changed("auto_round_fp8_static", "act_sym", False), "act_sym False"),
        (changed("auto_round_fp8_block", "weight_block_size", [64, 64]), "weight_block_size the same, got"),
        (changed("auto_round_fp8_block", "act_group_size", 64), "act_group_size 64 is not understood; known: 128"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_what_is_not_understood(config: dict[str, Any], match: str) -> None:
    require_refusal(config, EXPERTS, match)


@pytest.mark.parametrize(
    ("version", "sym", "storage"),
    [("0.13.0", False, "gptq"), ("0.15.1", False, "gptq"), ("0.16.0", False, "gptq_v2"), ("1.0", False, "gptq_v2")]
    + [(version, True, "gptq") for version in ("0.15.1", "0.16.1", None)],
)
def test_the_writer_without_a_model_packs_by_the_layer(version: str | None, sym: bool, storage: str) -> None:
    config = {**CONFIGS["auto_round_model_free_0_15"], "autoround_version": version, "sym": sym}
    assert read_layer(config, EXPERTS).w2.storage == storage


def test_words_of_kernels_beside_the_packing() -> None:
    for word, storage in {
        "auto_round:gptq:exllamav2": "gptq",
        "auto_round:exllamav2": "gptq_v2",
        "auto_round:gptqmodel": "gptq_v2",
        "auto_round:auto_awq": "awq",
        "auto": "gptq",
        None: "gptq",
    }.items():
        config = {**CONFIGS["auto_round_asym"], "packing_format": word, "backend": "auto"}
        assert read_layer(config, "model.language_model.layers.0.mlp.experts").w13.storage == storage


def test_a_part_of_a_name_is_an_expression() -> None:
    config = changed("auto_round_gptq", "extra_config", {"mlp.experts": {"group_size": 64}, "mlp.gate": {"bits": 16}})
    assert read_layer(config, EXPERTS).quant.w13 == SCHEMES["w4a16_int4_g64"]


def test_an_exact_name_counts_before_expressions() -> None:
    names = [f"{EXPERTS}.{expert}.{half}_proj" for expert in range(2) for half in ("gate", "up", "down")]
    extra = {".*experts.*": {"bits": 16}, **{name: {"group_size": 64} for name in names}}
    stored = read_layer(changed("auto_round_gptq", "extra_config", extra), EXPERTS, num_experts=2)
    assert stored.quant.w2 == SCHEMES["w4a16_int4_g64"]


@pytest.mark.error_path
def test_entries_for_some_experts_are_refused() -> None:
    extra = {f"{EXPERTS}.0.{half}_proj": {"bits": 8} for half in ("gate", "up", "down")}
    with pytest.raises(SpecError, match="names expert 0 and not expert 1"):
        read_layer(changed("auto_round_gptq", "extra_config", extra), EXPERTS, num_experts=2)


def test_modules_that_its_gptq_files_list_expert_by_expert() -> None:
    inside = [[f"mlp.experts.{expert}.{half}_proj" for expert in range(2) for half in ("gate", "up", "down")]]
    config = changed("auto_round_as_gptq", "modules_in_block_to_quantize", inside)
    assert read_layer(config, "model.layers.0.mlp.experts", num_experts=2).w2.storage == "gptq"
