from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import quant
from moe_core.errors import SpecError
from moe_core.quant import (
    ACTIVATION_DTYPES,
    ACTIVATION_SCALING,
    BF16,
    FP8_BLOCK128,
    NVFP4,
    NVFP4_W4A16,
    PER_TENSOR,
    SCALE_DTYPES,
    SCHEMES,
    W4A4_INT4,
    W8A8_INT8,
    WEIGHT_DTYPES,
    WHOLE,
    LayerQuant,
    QuantScheme,
    known,
)


def test_a_pickled_hash_is_not_used_in_another_process() -> None:
    # Hashes of strings differ from process to process; a kept one would make equal schemes miss each other in sets.
    both = LayerQuant(NVFP4, W8A8_INT8)
    assert both in {LayerQuant(NVFP4, W8A8_INT8)}
    code = (
        "import pickle, sys; from moe_core.quant import NVFP4, W8A8_INT8, LayerQuant; "
        "got = pickle.load(sys.stdin.buffer); "
        "sys.exit(not (got in {LayerQuant(NVFP4, W8A8_INT8)} and got.w13 in {NVFP4}))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "7"}
    assert subprocess.run([sys.executable, "-c", code], input=pickle.dumps(both), env=environ).returncode == 0


@pytest.mark.parametrize("name", SCHEMES)
def test_named_schemes(name: str) -> None:
    scheme = QuantScheme.from_name(name)
    assert (scheme.label, str(scheme)) == (name, name)
    assert eval(repr(scheme), vars(quant)) == scheme
    assert pickle.loads(pickle.dumps(scheme)) == scheme
    assert scheme.is_quantized is (name not in ("fp32", "bf16", "fp16"))
    assert not scheme.is_pattern


def test_names_are_distinct_schemes() -> None:
    assert len(set(SCHEMES.values())) == len(SCHEMES)


def test_every_constant_has_its_name() -> None:
    constants = {name.lower(): value for name, value in vars(known).items() if isinstance(value, QuantScheme)}
    assert constants == SCHEMES
    assert all(vars(quant)[name.upper()] is scheme for name, scheme in SCHEMES.items())


def _scheme(**fields: Any) -> QuantScheme | None:
    try:
        return QuantScheme(**fields)
    except SpecError:
        return None


_SIZES = st.sampled_from([WHOLE, 1, 16, 32, 128])
_ANY_SCHEME = st.builds(
    _scheme,
    weight_dtype=st.sampled_from(WEIGHT_DTYPES),
    weight_block=st.none() | st.tuples(_SIZES, _SIZES),
    weight_scale=st.sampled_from(SCALE_DTYPES),
    global_scale=st.booleans(),
    zero_point=st.booleans(),
    activation_dtype=st.sampled_from(ACTIVATION_DTYPES),
    activation_scaling=st.sampled_from(ACTIVATION_SCALING),
    activation_group=_SIZES | st.just(0),
    activation_scale=st.sampled_from(SCALE_DTYPES),
).filter(lambda scheme: scheme is not None)


@given(one=_ANY_SCHEME, other=_ANY_SCHEME)
def test_any_scheme_is_a_value_with_a_label_of_its_own(one: QuantScheme, other: QuantScheme) -> None:
    assert eval(repr(one), vars(quant)) == one
    assert pickle.loads(pickle.dumps(one)) == one
    assert (one.label == other.label) is (one == other)


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        (
            {"weight_dtype": "any", "weight_block": "any", "weight_scale": "any"},
            {
                *("fp32", "bf16", "fp16", "mxfp4_w4a16", "mxfp8_w8a16"),
                *("fp8_block128_w8a16", "fp8_tensor_w8a16", "fp8_channel_w8a16", "w8a16_int8", "w8a16_int8_g128"),
                *("w4a16_int4", "w4a16_int4_g32", "w4a16_int4_g64", "w4a16_int4_g128"),
            },
        ),
        (attrs.asdict(FP8_BLOCK128) | {"weight_scale": "any"}, {"fp8_block128"}),
        (
            attrs.asdict(FP8_BLOCK128) | {"weight_scale": "any", "activation_scale": "any"},
            {"fp8_block128", "fp8_block128_ue8m0"},
        ),
        (attrs.asdict(W8A8_INT8) | {"weight_dtype": "any"}, {"w8a8_int8", "w4a8_int8"}),
        (attrs.asdict(NVFP4), {"nvfp4"}),
    ],
)
def test_patterns(pattern: dict[str, Any], matching: set[str]) -> None:
    wanted = QuantScheme(**pattern)
    assert {name for name, scheme in SCHEMES.items() if scheme.matches(wanted)} == matching


def test_what_shares_a_scale() -> None:
    whole_rows = {name for name, scheme in SCHEMES.items() if scheme.scales_whole_rows}
    per_tensor = {name for name in whole_rows if SCHEMES[name].is_per_tensor}
    assert per_tensor == {"fp8_tensor", "fp8_tensor_static", "fp8_tensor_w8a16"}
    assert whole_rows - per_tensor == {
        *("fp8_channel", "fp8_channel_w8a16", "w8a8_int8", "w8a16_int8"),
        *("w4a16_int4", "w4a8_int8", "w4a4_int4"),
    }
    assert SCHEMES["fp8_tensor"].block_of(6, 8) == SCHEMES["bf16"].block_of(6, 8) == (6, 8)
    assert SCHEMES["fp8_channel"].block_of(6, 8) == (1, 8)
    by_batch = {name for name, scheme in SCHEMES.items() if scheme.scales_by_batch}
    assert by_batch == set()
    assert attrs.evolve(SCHEMES["fp8_tensor"], activation_group=PER_TENSOR).scales_by_batch


@pytest.mark.error_path
def test_every_weight_has_a_size_and_a_pattern_has_none() -> None:
    names = ("fp32", "fp16", "mxfp8", "w8a8_int8", "w4a8_int8", "nvfp4")
    assert [SCHEMES[name].weight_bits for name in names] == [32, 16, 8, 8, 4, 4]
    with pytest.raises(SpecError, match="is a pattern, whose weights have no size"):
        _ = QuantScheme(weight_dtype="any").weight_bits


@pytest.mark.parametrize("name", SCHEMES)
def test_only_static_fp4_brings_an_input_global_scale(name: str) -> None:
    assert SCHEMES[name].has_input_global_scale is (name == "nvfp4")


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"weight_dtype": "fp9"}, "QuantScheme, field 'weight_dtype': 'fp9' is not one of"),
        ({"weight_dtype": "bf16", "weight_scale": "fp32"}, "unquantized bf16 weights have no block and no scale"),
        ({"weight_dtype": "fp8"}, "fp8 weights need weight_block and weight_scale"),
        ({"weight_dtype": "bf16", "activation_dtype": "fp8"}, "activation_dtype 'fp8' and activation_scaling 'none'"),
        ({"weight_dtype": "fp8", "weight_block": 128, "weight_scale": "fp32"}, "weight_block: expected .rows, columns"),
        ({"weight_dtype": "fp8", "weight_block": (0, 1), "weight_scale": "fp32"}, "weight_block: expected"),
        ({"weight_dtype": "bf16", "activation_group": -2}, "activation_group: expected an int > 0"),
        ({"weight_dtype": "bf16", "global_scale": 1}, "global_scale: expected True, False or 'any', got 1"),
    ],
)
def test_schemes_that_cannot_be(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        QuantScheme(**fields)


@pytest.mark.error_path
def test_an_unknown_name() -> None:
    with pytest.raises(SpecError, match="quantization scheme: 'fp8' is not one of fp32, bf16"):
        QuantScheme.from_name("fp8")


def test_a_scheme_without_a_name_says_its_fields() -> None:
    scheme = attrs.evolve(W8A8_INT8, weight_block=(WHOLE, WHOLE))
    assert scheme.label.startswith("int8(weight_block=(-1, -1), weight_scale=fp32, activation_dtype=int8")


def test_both_projections() -> None:
    assert LayerQuant.of(BF16) == LayerQuant(BF16, BF16)
    mixed = LayerQuant(W4A4_INT4, W8A8_INT8)
    assert LayerQuant.of(mixed) is mixed
    assert str(mixed) == "w4a4_int4/w8a8_int8"
    assert mixed.is_quantized
    assert not LayerQuant.of(BF16).is_quantized


@pytest.mark.parametrize(
    ("scheme", "inner", "tp_size", "w13", "w2"),
    [
        (FP8_BLOCK128, 256, 1, (128, 128), (128, 128)),
        # One tile over the end of the gate.
        (FP8_BLOCK128, 64, 1, (64, 128), (128, 128)),
        # A rank's 96 rows end inside a tile.
        (FP8_BLOCK128, 96, 2, (32, 128), (128, 32)),
        (W8A8_INT8, 10, 4, (1, WHOLE), (1, WHOLE)),
        (NVFP4, 24, 2, (1, 16), (1, 8)),
        (BF16, 10, 4, None, None),
    ],
)
def test_blocks_end_where_a_share_ends(scheme: QuantScheme, inner: int, tp_size: int, w13: Any, w2: Any) -> None:
    cut = LayerQuant.of(scheme).cut(inner, halves=2, tp_size=tp_size)
    assert (cut.w13.weight_block, cut.w2.weight_block) == (w13, w2)


def test_a_layer_without_gate_keeps_its_tiles() -> None:
    assert LayerQuant.of(FP8_BLOCK128).cut(192, halves=1, tp_size=1) == LayerQuant.of(FP8_BLOCK128)


def test_the_distance_to_a_pattern_counts_fields() -> None:
    assert W8A8_INT8.distance(W8A8_INT8) == 0
    assert NVFP4.distance(NVFP4_W4A16) == 4
    assert W8A8_INT8.distance(attrs.evolve(W8A8_INT8, weight_block="any")) == 0
