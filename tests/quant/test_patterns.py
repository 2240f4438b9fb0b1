"""Patterns of names: none is missed for looking at few, many cost little, and none may take for ever."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core.errors import SpecError
from moe_core.quant import read_layer
from moe_core.quant.hf.pattern import Pattern, expression, wildcards
from moe_core.quant.hf.weight import Weight

WEIGHTS = [
    Weight("model.layers.3.mlp.experts", "up", "bf16"),
    Weight("model.layers.13.mlp.experts", "down", "bf16"),
    Weight("layers.1.block_sparse_moe", "gate", "bf16"),
]
_WORDS = (
    "model",
    "layers",
    "mlp",
    "experts",
    "exp",
    "erts",
    "sparse_moe",
    "up",
    "_proj",
    "w2",
    "self_attn",
    "1",
    "3",
    "12",
)
_OF_EXPRESSIONS = (
    "\\.",
    ".",
    "\\d",
    "\\d+",
    "[0-9]",
    "[^.]+",
    ".*",
    "*",
    "?",
    "+",
    "{2}",
    "{0,1}",
    "(",
    "(?:",
    ")",
    "|",
    "^",
    "$",
    "\\b",
)
EXPRESSIONS = st.lists(st.sampled_from([*_WORDS, *_WORDS, *_OF_EXPRESSIONS]), min_size=1, max_size=9).map("".join)
WILDCARDS = st.lists(st.sampled_from([*_WORDS, ".", ".", "*", "?", "[13]", "["]), min_size=1, max_size=9).map("".join)


def _require_kept(pattern: Pattern) -> None:
    """What matches a name of a weight may mean it."""
    for weight in WEIGHTS:
        names = (*weight.names, *(name for expert in range(130) for name in weight.names_in(expert)))
        found = [name for name in names if pattern.compiled.search(name)]
        if found and not pattern.may_mean(weight):
            raise AssertionError(f"{pattern} matches {found[0]} of {weight}")


@settings(max_examples=400, deadline=None)
@given(EXPRESSIONS)
def test_an_expression_that_matches_is_never_passed_over(text: str) -> None:
    try:
        pattern = expression(text)
    except SpecError:
        return
    _require_kept(pattern)


@settings(max_examples=200, deadline=None)
@given(WILDCARDS)
def test_wildcards_that_match_are_never_passed_over(text: str) -> None:
    _require_kept(wildcards(text))


@pytest.mark.parametrize(
    "text",
    [
        r"model\.layers\.3\.mlp\.experts\.47\.up_proj",
        r"\w+\.47\.up_proj",
        r"exper(ts)\.47\.up_proj",
        r"layers.3.mlp.experts.4\d.u?p_proj",
        r"(?i)MODEL.LAYERS",
        r"\x6dodel\.layers",
        r"(m)odel.layers.3.\1lp",
        r"shared|experts\.47",
        r".*x{0}experts",
        r".*x*experts\.[1-9]+\.up_proj$",
        r"(?s:.*experts)",
    ],
)
def test_expressions_whose_letters_are_not_plain_to_see(text: str) -> None:
    assert re.search(text, "model.layers.3.mlp.experts.47.up_proj")
    assert expression(text).may_mean(WEIGHTS[0])


@pytest.mark.parametrize(
    "text", [r".*layers\.3\.self_attn\..*", r"model\.layers\.30\..*", r".*\.mlp\.gate$", r"layers\.3\.mlp\.down_proj"]
)
def test_expressions_for_other_modules_are_told_by_their_letters(text: str) -> None:
    assert expression(text).letters
    assert not expression(text).may_mean(Weight("model.layers.3.mlp.experts", "down", "bf16", 8))


def _configs(patterns: list[str]) -> list[dict[str, Any]]:
    """A configuration of every method that has expressions."""
    awq, gptq, auto = ({"quant_method": name, "bits": 4, "group_size": 128} for name in ("awq", "gptq", "auto-round"))
    return [
        awq | {"modules_to_not_convert": [f"re:{pattern}" for pattern in patterns]},
        gptq | {"dynamic": {f"-:{pattern}": {} for pattern in patterns}},
        auto | {"extra_config": {pattern: {"bits": 16} for pattern in patterns}},
        {"quant_method": "quark", "global_quant_config": None, "exclude": [f"re:{pattern}" for pattern in patterns]},
    ]


def test_thousands_of_patterns_cost_little() -> None:
    patterns = [rf".*layers\.{layer}\.self_attn\.{part}_proj" for layer in range(250) for part in "qkvo"]
    started = time.perf_counter()
    for config in _configs(patterns):
        for layer in range(8):
            read_layer(config, f"model.layers.{layer}.mlp.experts", num_experts=128)
    # Half a second here; matched one by one it is minutes.
    assert time.perf_counter() - started < 30


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (r"(\w+)+x", "it repeats a group that itself holds a repeat or alternatives"),
        (r"(?:(?:\w*)\.)*x", "it repeats a group"),
        (r"(a|\w)*x", "it repeats a group"),
        (r"((\w?)){40}x", "it repeats a group"),
        (r"(?:.+\.?){3,}x", "it repeats a group"),
        (r".*.*.*.*x", "too many of its repeats and alternatives follow each other with no letter between them"),
        (r"\w*[a-z.]*e(\w*)\w*[.-](?=.*).*.*x", "too many"),
        (r".*(?:e)?.*(e)?.*(?:e|)?.*x", "too many"),
        (r"(?!.*.*.*.*x)y", "too many"),
        (r"(?:.*|e.*)(?:.*e|.*)(?:e|.*)(?:.*|e)x", "too many"),
        (".?" * 40 + r"\w{40}", "too many"),
        (r"(\w|.)" * 40 + "x", "too many"),
        ("(e|e)(x|x)(p|p)" * 6 + "x", "too many"),
    ],
)
def test_expressions_that_may_take_for_ever_are_refused(pattern: str, fault: str) -> None:
    for config in _configs([pattern]):
        with pytest.raises(
            SpecError, match=rf"experts \(gate\): matching '.*' may take for ever, since {fault}.*; write a plainer"
        ):
            read_layer(config, "model.layers.3.mlp.experts", num_experts=8)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.experts\.\d+\.(gate|up|down)_proj$",
        r"^(?:model\.)?(?:language_model\.)?layers\.(0|3|12)\..*(q|k|v)_proj.*",
        r"(?!.*experts).*\.mlp\..*",
        r"model.layers.\d+.mlp.experts.\d+.(w1|w2|w3).*",
        r"(.*\.)?mlp\.(\w+\.)?gate[a-z_]*",
        r".*\d+.*",
        r"(?:(?:model\.)?layers\.(?:0|3)\.(mlp|moe)\.experts\.\d+\.(?:up|gate)_proj.*)",
        r"\(\w+\)+",
        r"[(]a[)*|+]*",
        r".*(?:^|\.)(?:attn_hc|ffn_hc|hyper_connection|mapping_proj|router)(?:\..*)?$",
        r"^(?!.*visual.*)(?!.*lm_head.*)(?!.*mtp.*).*$",
        r"^(?!.*(?:self_attn\.(?:q_proj|k_proj|v_proj|b_proj)|vision_tower\..*|mm_projector\..*)$).*$",
        r"(?!.*(?:mtp|stages)\.\d+\.).*(?:mlp|ffn)\.experts\.\d+\.(?:gate_proj|up_proj|down_proj|w[123])$",
        r".*(self_attn|linear_attn).*(q|k|v|o)_proj.*",
        r"^.*[.]layers[.][0-9]+[.].*[.]\d+[.].*[.]\w+$",
        r".*\.layers\.(3|7|11)\.self_attn\.(f_a_proj|b_proj|.*conv1d.*|.*norm.*|indexer.*)$",
        r"model\.layers\.(?:" + "|".join(map(str, range(60))) + r")\.mlp\.experts\.\d+\.(?:gate|up|down)_proj",
    ],
)
def test_expressions_that_tools_write_are_taken(pattern: str) -> None:
    assert expression(pattern).compiled.pattern == pattern
