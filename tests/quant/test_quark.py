"""Quark's configurations: which layers their lists mean, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_experts import make_request, values_of
from quant_configs import CONFIGS, changed, require_refusal
from stored_experts import MODULE, WRITERS, save

from moe_core import ActivationSpec, LayerRequest, make_plan
from moe_core.environment import Environment
from moe_core.errors import SpecError
from moe_core.manager import default_manager
from moe_core.quant import SCHEMES, LayerQuant, read_layer
from moe_core.weights.checkpoint import Checkpoint
from moe_core.weights.loading import load_experts

EXPERTS = "model.layers.7.mlp.experts"
ALL = "global_quant_config"


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("config", "match"),
    [
        (changed("quark_fp8_static", "rotation", 1), "field 'rotation'"),
        ({"quant_method": "quark", "layer_quant_config": {}}, "expected global_quant_config, null if .* there is none"),
        (changed("quark_fp8_static", "export/weight_format", "fake_quantized"), "weight_format 'fake_quantized'"),
        (
            changed("quark_int4", "export/pack_method", "order"),
            "pack_method 'order' is not understood; known: absent, reorder",
        ),
        (changed("quark_fp8_static", "algo_config", [{"name": "svdquant"}]), "name 'svdquant' .*known: autoround"),
        (changed("quark_fp8_static", "algo_config", ["awq"]), "expected algo_config to be algorithms"),
        (
            changed("quark_fp8_static", "algo_config", [{"name": "rotation", "r4": True}]),
            "r4 True is not understood; known: absent, False",
        ),
        (changed("quark_fp8_static", f"{ALL}/output_tensors", {"dtype": "fp8_e4m3"}), "output_tensors of quantized"),
        (changed("quark_fp8_static", f"{ALL}/bias", {"dtype": "int8"}), "bias of quantized layers are not understood"),
        (changed("quark_fp8_static", f"{ALL}/weight", None), "quantizes activations and not weights"),
        (
            changed("quark_fp8_static", f"{ALL}/weight/dtype", "uint8"),
            "dtype 'uint8' is not understood; known: fp8_e4m3",
        ),
        (changed("quark_fp8_static", f"{ALL}/weight/dtype", "fp6_e2m3"), "dtype 'fp6_e2m3'"),
        (
            changed("quark_fp8_static", f"{ALL}/weight/dtype", "fp4"),
            "dtype 'fp4' with qscheme 'per_tensor' are not read",
        ),
        (changed("quark_fp8_static", f"{ALL}/weight/is_dynamic", True), "weights with is_dynamic or is_scale_quant"),
        (changed("quark_fp8_static", f"{ALL}/weight/smooth", 1), "field 'smooth'"),
        (changed("quark_fp8_static", f"{ALL}/weight/symmetric", False), "fp8 weights have no zero point"),
        (changed("quark_fp8_static", f"{ALL}/weight/zero_point_type", "float32"), "zero_point_type 'float32'"),
        (changed("quark_fp8_static", f"{ALL}/weight/scale_format", "e5m3"), "scale_format 'e5m3'"),
        (changed("quark_fp8_static", f"{ALL}/input_tensors/qscheme", "per_channel"), "qscheme 'per_channel'"),
        (changed("quark_fp8_static", f"{ALL}/input_tensors/symmetric", False), "symmetric False"),
        (changed("quark_ptpc_fp8", f"{ALL}/input_tensors/ch_axis", 0), "ch_axis 0 is not understood; known: 1"),
        (changed("quark_ptpc_fp8", f"{ALL}/input_tensors/scale_type", "pof2"), "scale_type 'pof2'"),
        (changed("quark_ptpc_fp8", f"{ALL}/weight/ch_axis", 1), "ch_axis 1 is not understood; known: 0"),
        (changed("quark_mxfp4", f"{ALL}/weight/group_size", 0), "group_size of qscheme 'per_group' to be positive"),
        (changed("quark_int4", f"{ALL}/weight/ch_axis", 0), "ch_axis 0 is not understood; known: -1, 1"),
        (changed("quark_int4", f"{ALL}/weight/dtype", "int8"), "dtype 'int8' with qscheme 'per_group' are not read"),
        (
            changed("quark_fp8_block", "layer_type_quant_config/Linear/weight/block_size", [128]),
            "block_size to be two",
        ),
        (changed("quark_mxfp4", "layer_quant_config", {"*layers.3.*": "fp8"}), "layer_quant_config to be names with"),
        (
            changed("quark_mxfp4", "layer_quant_config", {"*experts*": {"weight": None}, "*.7.*": {"bias": None}}),
            r"layer_quant_config: '\*experts\*' and '\*.7.\*' both mean it and differ",
        ),
        (changed("quark_mxfp4", "exclude", ["re:*"]), "is not a regular expression"),
        (changed("quark_mxfp4", "exclude", ["*.experts.[0-3].*"]), "names expert 0, 1, 2, 3 and not expert"),
        (changed("quark_nvfp4", f"{ALL}/weight", []), "weights in stages of nothing are not read"),
        (changed("quark_nvfp4", f"{ALL}/input_tensors", {"dtype": "fp4"}), "beside NVFP4 weights to be in two stages"),
        (changed("quark_nvfp4", f"{ALL}/weight/1/dtype", "fp8_e5m3"), "in stages of fp4 per_group, then fp8_e5m3"),
        (changed("quark_nvfp4", f"{ALL}/weight/0/group_size", 32), "is read in groups of 16"),
        (changed("quark_nvfp4", f"{ALL}/input_tensors/1/is_dynamic", True), "are read as fp4 in groups of 16"),
        (changed("quark_int4_fp8", f"{ALL}/weight/1/symmetric", False), "int4 on top of fp8 with zero points"),
        (
            changed("quark_fp8_static", f"{ALL}/input_tensors", [{"dtype": "fp8_e4m3"}]),
            "input_tensors in stages are read beside NVFP4 weights alone",
        ),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_what_is_not_understood(config: dict[str, Any], match: str) -> None:
    require_refusal(config, EXPERTS, match)


def _names(layer: int, experts: int) -> list[str]:
    module = f"model.layers.{layer}.mlp.experts"
    return [f"{module}.{expert}.{half}_proj" for expert in range(experts) for half in ("gate", "up", "down")]


def test_experts_of_a_draft_layer_that_are_excluded_one_by_one() -> None:
    # https://github.com/vllm-project/vllm/pull/48226
    config = changed("quark_mxfp4", "exclude", _names(61, 64))
    left, taken = (read_layer(config, f"model.layers.{layer}.mlp.experts", num_experts=64) for layer in (61, 60))
    assert left.quant == LayerQuant.of(SCHEMES["bf16"])
    assert taken.quant == LayerQuant.of(SCHEMES["mxfp4"])


@pytest.mark.error_path
def test_a_list_that_excludes_some_experts_is_refused() -> None:
    config = changed("quark_mxfp4", "exclude", _names(61, 63))
    with pytest.raises(SpecError, match=r"names expert 0, 1, 2, 3, \.{3} and not expert 63"):
        read_layer(config, "model.layers.61.mlp.experts", num_experts=64)


def test_patterns_mean_whole_names() -> None:
    for entry, meant in {"*.mlp": False, "model.layers.7.mlp": False, "*.mlp.*": True, "re:.*mlp": True}.items():
        stored = read_layer(changed("quark_mxfp4", "exclude", [entry]), EXPERTS)
        assert (stored.w13.storage == "plain") is meant, entry


def test_a_pattern_may_leave_a_layer_alone() -> None:
    layers = {"*layers.7.*": {"weight": None, "input_tensors": None, "output_tensors": None, "bias": None}}
    assert read_layer(changed("quark_mxfp4", "layer_quant_config", layers), EXPERTS).w2.storage == "plain"


def test_a_configuration_for_other_layers_alone_leaves_experts_alone() -> None:
    assert read_layer(changed("quark_mxfp4", "global_quant_config", None), EXPERTS).w2.storage == "plain"


@pytest.mark.parametrize("tp_size", [1, 3])
def test_gate_and_up_of_single_experts_in_one_matrix(tp_size: int, tmp_path: Path) -> None:
    # As in gpt-oss: rows of gate and up by turns, a bias, and an activation scale for both.
    stored = read_layer(CONFIGS["quark_mxfp4_fp8"], MODULE, num_experts=3)
    activation = ActivationSpec(row_order="interleaved")
    request = make_request(stored.quant, tp_size=tp_size, activation=activation, bias=True)
    g, tensors, values = torch.Generator().manual_seed(3), {}, []
    for expert in range(3):
        for word, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            matrix = WRITERS["packed_fp4"](g, rows, columns, stored.quant.w13)
            of_one = {**matrix.tensors, "bias": torch.randn(rows, generator=g).bfloat16()}
            tensors |= {f"{MODULE}.{expert}.{word}.{suffix}": tensor for suffix, tensor in of_one.items()}
            values.append(matrix.values)
    save(tmp_path, tensors)
    size = 96 // tp_size
    for rank in range(tp_size):
        with Checkpoint(tmp_path) as checkpoint:
            found = load_experts(checkpoint, MODULE, request, stored, tp_rank=rank).tensors
        mine = slice(2 * rank * size, 2 * (rank + 1) * size)
        wanted = torch.stack([whole[mine] for whole in values[0::2]])
        assert torch.equal(values_of(found, request, "w13"), wanted)
        wanted = torch.stack([whole[:, rank * size : (rank + 1) * size] for whole in values[1::2]])
        assert torch.equal(values_of(found, request, "w2"), wanted)
        assert torch.equal(found["b13"][2], tensors[f"{MODULE}.2.gate_up_proj.bias"][mine])
        largest = max(float(tensors[f"{MODULE}.{expert}.gate_up_proj.input_scale"]) for expert in range(3))
        assert found["w13_input_scale"].tolist() == [pytest.approx(largest)] * 3


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("quark_mxfp4", "fp4 weights are computed, but with other activations"),
        ("quark_mxfp4_fp8", "fp4 weights are computed, but with other activations"),
        ("quark_int4_fp8", "int4 weights are computed, but with other global scales and activations"),
    ],
)
def test_why_triton_leaves_a_scheme_to_torch(name: str, why: str) -> None:
    quant = read_layer(CONFIGS[name], EXPERTS, num_experts=2).quant
    request = LayerRequest(num_experts=2, top_k=1, hidden_size=64, intermediate_size=64, quant=quant)
    machine = Environment(device_type="cuda", arch="sm90", packages={"torch": "2.11.0", "triton": "3.6.0"})
    plan, decision = make_plan(default_manager(), request, machine)
    assert plan.routes[0].runner.full_name == "torch:torch.standard"
    assert re.search(rf"triton:triton.contiguous, .*: scheme: needs .*, found .*; {why}\n", decision.explain())
