"""Names in lists and tables of configurations, in every form that is in use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from moe_core.errors import SpecError
from moe_core.expert_names import PROJECTIONS
from moe_core.quant import BF16, FP8_BLOCK128, NVFP4, QuantScheme, read_layer
from moe_core.quant.hf.name_list import is_listed
from moe_core.quant.hf.weight import Weight, experts_and_halves

EXPERTS = "model.layers.3.mlp.experts"

ALL_OF_THEM = [
    "model.layers.3.mlp.experts",
    "model.layers.3.mlp",
    "model.layers.3",
    "model.layers.3.",
    "layers.3.mlp.experts",
    "language_model.model.layers.3.mlp.experts",
    "model.language_model.layers.3",
    "mlp.experts",
    "experts",
    "model.layers.3*",
    "model.layers.3.*",
    "model.layers.*.mlp.experts",
    "model.layers.?.mlp",
    "*.mlp.experts*",
    "*experts.*",
    "re:.*mlp.experts.*",
    r"re:model\.layers\.3\..*",
    r"re:.*\.experts\.\d+\.(gate|up|down)_proj$",
    r"re:.*\.experts\.\d+\.(w1|w2|w3)$",
    r"re:^language_model\.model\.layers\.3\..*",
    r"model\.layers\.3",
    r"model.layers.(0|3).mlp",
    ".*experts",
]
NONE_OF_THEM = [
    "lm_head",
    "model.layers.30",
    "model.layers.3.mlp.gate",
    "model.layers.3.mlp.expert",
    "model.layers.3.mlp.shared_experts",
    "mtp.layers.3.mlp.experts",
    "mtp.layers.3",
    "gate",
    "mlp.gate",
    "*.mlp.gate",
    "*.mlp.gate*",
    "*shared_expert*",
    "model.layers.*.self_attn",
    "model.layers.3[0-9]*",
    r"re:.*mlp.gate$",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:layers\.30\..*",
    "re:experts",
    r"model\.layers\.1",
    r"model\.layers\.3\.mlp\.exp",
]


@pytest.mark.parametrize("half", PROJECTIONS)
@pytest.mark.parametrize("entry", ALL_OF_THEM)
def test_entries_that_mean_the_whole_module(entry: str, half: str) -> None:
    assert is_listed(Weight(EXPERTS, half, "bf16"), ["lm_head", entry])


@pytest.mark.parametrize("half", PROJECTIONS)
@pytest.mark.parametrize("entry", NONE_OF_THEM)
def test_entries_that_mean_something_else(entry: str, half: str) -> None:
    assert not is_listed(Weight(EXPERTS, half, "bf16"), [entry])


@pytest.mark.parametrize(
    ("entry", "halves"),
    [
        ("down_proj", {"down"}),
        (f"{EXPERTS}.down_proj", {"down"}),
        ("re:.*down_proj", {"down"}),
        (f"{EXPERTS}.gate_up_proj", {"gate", "up"}),
        ("experts.gate_up_proj", {"gate", "up"}),
        (f"{EXPERTS}.w13", {"gate", "up"}),
        (f"{EXPERTS}.gate_proj", {"gate"}),
        (r"re:.*experts\.\d+\.gate_proj", {"gate"}),
        ("*.w3", {"up"}),
    ],
)
def test_entries_that_mean_one_projection(entry: str, halves: set[str]) -> None:
    assert {half for half in PROJECTIONS if is_listed(Weight(EXPERTS, half, "bf16"), [entry])} == halves


@pytest.mark.parametrize("experts", ["model.layers.3.mlp.experts", "model.language_model.layers.3.mlp.experts"])
@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model.", "thinker.model."])
def test_prefixes_of_the_text_part_do_not_matter(experts: str, prefix: str) -> None:
    for entry in (f"{prefix}layers.3", f"{prefix}layers.3*", rf"re:{prefix}layers\.3\..*"):
        assert is_listed(Weight(experts, "up", "bf16"), [entry])


def test_a_name_with_a_number_is_not_that_layer_of_the_draft_model() -> None:
    draft = Weight("mtp.layers.0.mlp.experts", "up", "bf16")
    assert not is_listed(draft, ["model.layers.0", "layers.0.mlp.experts", "model.layers.0*"])
    assert is_listed(draft, ["mtp"])
    assert is_listed(draft, ["mtp*"])
    assert is_listed(draft, ["mtp.layers.0*"])


def test_layer_zero_is_not_expert_zero() -> None:
    table = {f"model.layers.{layer}.mlp.experts.0.up_proj": layer for layer in (0, 1)}
    assert Weight("model.layers.0.mlp.experts", "up", "bf16").entry(table) == 0


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (EXPERTS, (EXPERTS, ("gate", "up", "down"))),
        (f"{EXPERTS}.gate_up_proj", (EXPERTS, ("gate", "up"))),
        (f"{EXPERTS}.w13", (EXPERTS, ("gate", "up"))),
        (f"{EXPERTS}.12.w1", (EXPERTS, ("gate",))),
        (f"{EXPERTS}.up_proj", (EXPERTS, ("up",))),
        ("block_sparse_moe.output_linear", ("block_sparse_moe", ("down",))),
        ("", ("", ("gate", "up", "down"))),
    ],
)
def test_names_of_projections(module: str, expected: tuple[str, tuple[str, ...]]) -> None:
    assert experts_and_halves(module) == expected


MIXED = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.61*", "mtp*"]}


@pytest.mark.parametrize("draft", ["model.layers.61.mlp.experts", "mtp.layers.0.mlp.experts"])
def test_an_unquantized_draft_layer_beside_quantized_ones(draft: str) -> None:
    assert QuantScheme.from_hf(MIXED, "model.layers.60.mlp.experts") == NVFP4
    assert QuantScheme.from_hf(MIXED, draft) == BF16


def test_one_projection_left_alone() -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["experts.down_proj"]}
    layer = read_layer(config, EXPERTS)
    assert (layer.w13.scheme, layer.w2.scheme) == (FP8_BLOCK128, BF16)
    assert (layer.w13.storage, layer.w2.storage) == ("scaled", "plain")
    assert QuantScheme.from_hf(config, f"{EXPERTS}.gate_up_proj") == FP8_BLOCK128


def _listing(*names: str) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": list(names)}


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("config", "match"),
    [
        (_listing(f"{EXPERTS}.gate_proj"), r"experts \(gate\) is bf16 as plain, .* \(up\) is fp8_block128 as scaled"),
        (
            _listing(f"{EXPERTS}.7.up_proj", f"{EXPERTS}.9.up_proj"),
            r"\(up\): names expert 7, 9 and not expert 0, 1, 2, 3, \.\.\.",
        ),
        (_listing("re:mlp.(experts"), r"'mlp.\(experts' is not a regular expression"),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    **{f"{EXPERTS}.{e}.{p}_proj": {"quant_algo": "FP8"} for e in range(3) for p in PROJECTIONS},
                    f"{EXPERTS}.2.up_proj": {"quant_algo": "NVFP4"},
                },
            },
            r"\(up\): experts or names disagree: .*0.up_proj is .*FP8.*2.up_proj is .*NVFP4",
        ),
    ],
    ids=["halves", "experts", "regular expression", "table"],
)
def test_what_cannot_be_one_layer(config: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        read_layer(config, EXPERTS)


@pytest.mark.error_path
def test_a_layer_is_read_by_its_experts_module() -> None:
    with pytest.raises(SpecError, match=r"experts.down_proj' is a projection, expected the experts module"):
        read_layer(None, f"{EXPERTS}.down_proj")


@pytest.mark.error_path
def test_projections_that_differ_have_no_common_scheme() -> None:
    with pytest.raises(SpecError, match=r"\(down\) is bf16 as plain; .*one by one .read_layer"):
        QuantScheme.from_hf(_listing("experts.down_proj"), EXPERTS)


def _compressed(target: str, *ignored: str) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": [target], "weights": weights, "format": "mxfp4-pack-quantized"}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": list(ignored)}


@pytest.mark.parametrize("block", ["block_sparse_moe", "feed_forward", "ffn", "mlp"])
@pytest.mark.parametrize("called", ["its own name", "mlp"])
def test_blocks_by_the_names_of_transformers_classes(block: str, called: str) -> None:
    word = "mlp" if called == "mlp" else block
    config = _compressed(rf"re:.*{word}\.experts\.[0-9]+\.(gate|up|down)_proj$", f"model.layers.4.{word}.experts")
    found = [read_layer(config, f"model.layers.{layer}.{block}.experts", num_experts=8) for layer in (3, 4)]
    assert [layer.w13.storage for layer in found] == ["compressed_tensors_mxfp4", "plain"]


def test_experts_by_the_names_of_a_tool_that_takes_them_apart() -> None:
    config = _compressed(r"re:.*block_sparse_moe\.experts\.\d+\..*_proj$")
    assert read_layer(config, "model.layers.3.block_sparse_moe", num_experts=8).w2.storage == "compressed_tensors_mxfp4"


def test_a_dense_block_of_the_other_name_is_not_meant() -> None:
    config = _compressed("Linear", "re:.*mlp.*", r"re:.*mlp\.(gate|up|down)_proj$")
    for block in ("block_sparse_moe", "block_sparse_moe.experts"):
        assert read_layer(config, f"model.layers.3.{block}").w2.storage == "compressed_tensors_mxfp4"


NUMBER = 6


def _of_experts(experts: Iterable[int], prefix: str = "") -> list[str]:
    return [f"{prefix}{EXPERTS}.{e}.{p}" for e in experts for p in ("gate_proj", "up_proj", "down_proj")]


@pytest.mark.parametrize(
    "names",
    [
        [f"{EXPERTS}.{expert}" for expert in range(NUMBER)],
        _of_experts(range(NUMBER)),
        _of_experts(range(NUMBER), prefix="language_model."),
        [f"{EXPERTS}.0", rf"re:{EXPERTS}\.[1-5]\..*"],
        [r"re:.*experts\.[0-5]\."],
        [f"{EXPERTS}.{expert}*" for expert in range(NUMBER)],
    ],
    ids=lambda names: names[0],
)
def test_a_list_that_names_every_expert(names: list[str]) -> None:
    assert read_layer(_listing(*names), EXPERTS, num_experts=NUMBER).quant.w13 == BF16
    with pytest.raises(SpecError, match="how many there are is not known here"):
        read_layer(_listing(*names), EXPERTS)


@pytest.mark.error_path
@pytest.mark.parametrize("num_experts", [None, NUMBER, 384])
@pytest.mark.parametrize(
    "names",
    [
        [f"{EXPERTS}.0"],
        [f"{EXPERTS}.1"],
        [f"{EXPERTS}.0.gate_proj", f"{EXPERTS}.0.up_proj"],
        [f"{EXPERTS}.1.gate_proj"],
        [f"{EXPERTS}.0.gate_up_proj"],
        _of_experts([0, 1, 2, 3, 5]),
        _of_experts(range(NUMBER - 1)),
        [f"{EXPERTS}.0*"],
        [r"re:.*experts\.0\..*"],
        [r"re:.*experts\.5\..*"],
        [r"re:.*experts\.[1-9]+\..*"],
        [f"{EXPERTS}.?.up_proj", f"{EXPERTS}.3.down_proj"],
    ],
    ids=str,
)
def test_a_list_that_names_some_experts(names: list[str], num_experts: int | None) -> None:
    if num_experts == NUMBER and names[0].endswith("?.up_proj"):
        names = names[1:]
    with pytest.raises(SpecError, match=r"names expert \d.* and not expert \d.*; the experts of a layer must agree"):
        read_layer(_listing(*names), EXPERTS, num_experts=num_experts)


@pytest.mark.error_path
@pytest.mark.parametrize("pattern", [r".*experts\.47\..*", r".*experts\.4\d\..*", r".*experts\.1\d\d\..*"])
def test_a_pattern_that_means_some_experts(pattern: str) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {f"-:{pattern}": {}}}
    for wanted in (config, _listing(f"re:{pattern}")):
        with pytest.raises(SpecError, match=r"names expert .* and not expert"):
            read_layer(wanted, EXPERTS, num_experts=256)


@pytest.mark.error_path
def test_modules_in_a_block_that_are_some_experts() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    names = [[f"mlp.experts.{e}.{p}_proj" for p in ("gate", "up", "down")] for e in range(NUMBER)]
    config["modules_in_block_to_quantize"] = names
    assert read_layer(config, EXPERTS, num_experts=NUMBER).w2.storage == "gptq"
    config["modules_in_block_to_quantize"] = names[:-1]
    with pytest.raises(SpecError, match=r"\(gate\): names expert 0, 1, 2, 3, \.\.\. and not expert 5"):
        read_layer(config, EXPERTS, num_experts=NUMBER)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("experts", "num_experts", "match"),
    [
        ((0, 1, 3), None, r"names expert 0, 1, 3 and not expert 2"),
        ((1, 2), None, r"names expert 1, 2 and not expert 0"),
        ((0, 1), 3, r"names expert 0, 1 and not expert 2"),
    ],
)
def test_a_table_that_leaves_out_experts(experts: tuple[int, ...], num_experts: int | None, match: str) -> None:
    layers = {name: {"quant_algo": "FP8"} for name in _of_experts(experts)}
    config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with pytest.raises(SpecError, match=match):
        read_layer(config, EXPERTS, num_experts=num_experts)
    with pytest.raises(SpecError, match="names expert 0 and not expert 1"):
        read_layer({**config, "quantized_layers": {f"{EXPERTS}.0": {"quant_algo": "FP8"}}}, EXPERTS, num_experts=2)


@pytest.mark.error_path
def test_a_table_in_which_an_expert_after_a_gap_differs() -> None:
    table = {name: "FLOAT" for name in _of_experts((0, 1, 3))} | {f"{EXPERTS}.3.up_proj": "W8A8_DYNAMIC"}
    with pytest.raises(SpecError, match=r"names expert 0, 1, 3 and not expert 2|experts or names disagree"):
        Weight(EXPERTS, "up", "bf16").entry(table)


@pytest.mark.error_path
def test_a_table_that_names_a_far_expert_alone() -> None:
    # No set of all below it fits into memory.
    with pytest.raises(SpecError, match=r"names expert 123456789 and not expert 0, 1, 2, 3, \.\.\.;"):
        Weight(EXPERTS, "up", "bf16").entry({f"{EXPERTS}.123456789.up_proj": "FLOAT"})


@pytest.mark.error_path
@pytest.mark.parametrize("number", ["9" * 10, "9" * 5000], ids=len)
@pytest.mark.parametrize("num_experts", [None, NUMBER])
def test_numbers_of_experts_that_no_layer_has(number: str, num_experts: int | None) -> None:
    name = f"{EXPERTS}.{number}.up_proj"
    awq, gptq = ({"quant_method": method, "bits": 4, "group_size": 128} for method in ("awq", "gptq"))
    for config in (
        {"quant_method": "quark", "global_quant_config": None, "exclude": [name]},
        {"quant_method": "quark", "global_quant_config": None, "layer_quant_config": {name: {"weight": None}}},
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {name: {"bits": 16}}},
        awq | {"modules_to_not_convert": [name]},
        gptq | {"modules_in_block_to_quantize": [f"mlp.experts.{number}.up_proj"]},
    ):
        with pytest.raises(SpecError, match=r"has the number 999999999\.\.\., which counts nothing"):
            read_layer(config, EXPERTS, num_experts=num_experts)


@pytest.mark.error_path
@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "(" * 5000 + ")" * 5000], ids=["wrong", "large", "deep"])
def test_patterns_that_python_does_not_compile(pattern: str) -> None:
    for config in (
        {"quant_method": "quark", "global_quant_config": None, "exclude": [f"re:{pattern}"]},
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {pattern: {"bits": 16}}},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": [f"re:{pattern}"]},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {f"-:{pattern}": {}}},
    ):
        with pytest.raises(SpecError, match="is not a regular expression"):
            read_layer(config, EXPERTS)
