"""A wrong value in any field of any example is read or refused, and never an error of Python."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from quant_configs import CONFIGS

from moe_core.errors import MoeCoreError, SpecError
from moe_core.model_config import draft_layer_groups, layer_groups, quantization_of
from moe_core.quant import QuantScheme, StoredLayer, read_layer

pytestmark = pytest.mark.error_path

EXPERTS = "model.layers.1.mlp.experts"
VALUES: tuple[Any, ...] = (None, 0, -1, "x", [], {}, [1], {"a": 1}, {1: "a"}, True, 1.5)
MODEL = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def _places(config: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a nested configuration is."""
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        yield (*above, key)
        yield from _places(value, (*above, key))


def _replaced(config: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    inner: Any = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def _unexpected(config: dict[str, Any], *, with_added: bool) -> list[str]:
    """What is neither a layer nor an error of this project, for every place and value."""
    found = []
    places = [*_places(config), *([("x",), (1,)] if with_added else ())]
    for place in places:
        for value in VALUES:
            try:
                layer = read_layer(_replaced(config, place, value), EXPERTS, num_experts=3)
            except MoeCoreError:
                continue
            except Exception as error:
                found.append(f"{place} = {value!r}: {error!r}")
            else:
                if not isinstance(layer, StoredLayer):
                    found.append(f"{place} = {value!r}: {layer!r}")
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_with_every_kind_of_value(name: str) -> None:
    assert _unexpected(CONFIGS[name], with_added=True) == []


@pytest.mark.parametrize(
    ("method", "field"),
    [
        (method, field)
        for method, fields in {
            "awq": ("modules_to_not_convert", "w_bit", "q_group_size", "sym", "dynamic", "is_marlin_format"),
            "compressed-tensors": ("sparsity_config", "transform_config", "format", "ignore"),
            "fp8": ("modules_to_not_convert", "ignored_layers", "fmt", "scale_fmt", "expert_dtype"),
            "gptq": ("modules_in_block_to_quantize", "format", "version", "pack_dtype", "bits", "dynamic"),
            "modelopt": ("config_groups", "weights", "input_activations", "quantized_layers", "pre_quant_scale"),
            "mxfp4": ("modules_to_not_convert",),
        }.items()
        for field in fields
    ],
)
def test_fields_that_not_every_example_has(method: str, field: str) -> None:
    examples = [config for config in CONFIGS.values() if config.get("quant_method") == method]
    assert examples
    for config in examples:
        assert _unexpected({**config, field: None}, with_added=False) == []


@pytest.mark.parametrize("config", ["fp8", ["fp8"], [], 1, 0, True, False, ""], ids=repr)
def test_a_configuration_that_is_no_mapping(config: Any) -> None:
    with pytest.raises(SpecError, match=r"quantization_config.*expected"):
        read_layer(config, EXPERTS)
    with pytest.raises(SpecError, match=r"quantization_config.*expected"):
        QuantScheme.from_hf(config, EXPERTS)
    for model in ({**MODEL, "quantization_config": config}, {"text_config": MODEL, "compression_config": config}):
        with pytest.raises(SpecError, match=r"_config.*expected"):
            quantization_of(model)
        with pytest.raises(SpecError, match=r"_config.*expected"):
            layer_groups(model)


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [0], "decoder_sparse_step": 1, "expert_dtype": "fp8", "moe_layers": None},
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "deepseek_v4": {"swiglu_limit": 10.0, "mlp_layer_types": ["sparse", "sparse"]},
    "nemotron_h": {"hybrid_override_pattern": "ME", "mlp_hidden_act": "relu2", "num_dense_layers": 0},
    "jamba": {"expert_layer_period": 2, "expert_layer_offset": 1, "interleave_moe_layer_step": 1},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_k": [1, 2]},
    "omni": {"text_config": MODEL, "layers_block_type": ["moe", "attention"], "compression_config": None},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_a_model_with_every_kind_of_value(family: str) -> None:
    config = {**MODEL, "model_type": family, **FAMILIES[family]}
    found = []
    for place in _places(config):
        for value in VALUES:
            for read in (layer_groups, draft_layer_groups):
                try:
                    read(_replaced(config, place, value))
                except MoeCoreError:
                    continue
                except Exception as error:
                    found.append(f"{read.__name__}: {place} = {value!r}: {error!r}")
    assert found == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_act": ["silu"]}, r"unknown activation \"\['silu'\]\""),
        ({"mlp_layer_types": 5}, "expected mlp_layer_types to be a word per layer, got 5"),
        ({"mlp_layer_types": "dense"}, 'expected mlp_layer_types to be a word per layer, got "dense"'),
        ({"moe_layers": "01"}, 'expected moe_layers to be a list of layer indices, got "01"'),
        ({"moe_layer_freq": 1.5}, "which layers have experts is not understood from moe_layer_freq 1.5"),
        ({"model_type": "gpt_oss", "swiglu_alpha": [1]}, r"expected swiglu_alpha to be a number, got a list"),
        ({"num_nextn_predict_layers": [], "model_type": "deepseek_v3"}, "expected whole numbers"),
    ],
    ids=str,
)
def test_what_a_model_says_in_another_type(changes: dict[str, Any], match: str) -> None:
    config = {**MODEL, **changes}
    with pytest.raises(MoeCoreError, match=match):
        (*layer_groups(config), *draft_layer_groups(config))
