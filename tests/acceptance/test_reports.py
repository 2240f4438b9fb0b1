"""Further public reports of silent faults, asked through the adapter: each test tells what the fault gives apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference_moe
import torch
from adapter import MoECore
from case_lib import RefLib, expect, int_ckpt, mxfp4_ckpt, nvfp4_ckpt
from cases_open import _oai, dense
from reference_moe import det
from test_variants import FORMATS, LIMIT, QUANTIZED_LIMIT, Spec, as_divisors, error, layer, quantized


def require(output: torch.Tensor, wanted: torch.Tensor, *faults: torch.Tensor, limit: float = LIMIT) -> None:
    """`output` is what is wanted, and no fault comes near that."""
    assert all(reference_moe.rel(fault, wanted) > 2 * limit for fault in faults)
    assert reference_moe.rel(output.double(), wanted) < limit


def require_routing(num_experts: int, logits: torch.Tensor, top_k: int, **options: Any) -> torch.Tensor:
    """The same experts with the same weights as the oracle's; returns those as a matrix."""
    ids, weights = reference_moe.route(logits, top_k, **options)
    found_ids, found_weights = MoECore().route(logits, top_k, **options)
    assert torch.equal(found_ids, ids)
    wanted = dense(ids, weights, num_experts)
    # As the cases have it for routing.
    assert reference_moe.rel(dense(found_ids, found_weights, num_experts), wanted) < 1e-4
    return wanted


# ---- routing ---------------------------------------------------------------------------------------------------
def test_a_bias_far_from_zero_keeps_its_small_differences() -> None:
    # https://github.com/sgl-project/sglang/pull/31213
    logits = det((64, 64), 1, 1 / 64).bfloat16()
    bias = (6.94 + det((64,), 2, 0.246 / 254)).float()
    wanted = require_routing(64, logits, 8, scoring="sigmoid", bias=bias, scale=2.5)
    rounded, weights = reference_moe.route(logits, 8, scoring="sigmoid", bias=bias.bfloat16(), scale=2.5)
    assert reference_moe.rel(dense(rounded, weights, 64), wanted) > 0.1


@pytest.mark.parametrize("shift", [-40.0, 20.0])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_logits_of_one_sign(shift: float, scoring: str) -> None:
    # https://github.com/vllm-project/vllm/pull/37605
    logits = det((9, 16), 3, 1 / 64) + shift
    wanted = require_routing(16, logits, 4, scoring=scoring)
    assert ((wanted > 0).sum(1) == 4).all()


def test_one_expert_of_renormalized_scores_weighs_one() -> None:
    # https://github.com/databricks/megablocks/pull/87
    wanted = require_routing(16, det((9, 16), 4, 1 / 16), 1, scale=1.5)
    assert torch.allclose(wanted.sum(1), torch.full((9,), 1.5).double())


def test_experts_of_closed_groups_lose_against_negative_scores() -> None:
    # https://github.com/sgl-project/sglang/pull/3705
    logits, bias = det((9, 16), 5, 1 / 16), det((16,), 6) * 3 - 6
    wanted = require_routing(16, logits, 4, scoring="sigmoid", bias=bias, n_group=4, topk_group=1)
    assert (wanted.unflatten(1, (4, 4)).sum(-1) > 0).sum(1).eq(1).all()


# ---- activations -----------------------------------------------------------------------------------------------
def test_gates_are_clamped_from_above_alone() -> None:
    # https://github.com/vllm-project/vllm-ascend/issues/14363
    spec = {**_oai([(12, 12), (-12, -12), (-12, 12), (3, 1)]), "activation": "swiglu_limit", "limit": 2.0}
    gates_of_both_ends = spec["x"].clamp(-2, 2)
    wanted = expect(spec)
    require(MoECore().run(**spec), wanted, expect(spec, activation="swiglu"), expect(spec, x=gates_of_both_ends))


def test_a_limit_comes_before_the_rounding() -> None:
    # https://github.com/vllm-project/vllm-ascend/pull/9590
    spec = {**layer(seed=31, activation="swiglu_limit"), "limit": 1.0}
    spec["x"] = spec["x"] * 8
    spec["ckpt"] = int_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"], 4)
    require(MoECore().run(**spec), expect(spec), expect(spec, activation="swiglu"), limit=QUANTIZED_LIMIT)


# ---- experts and ranks -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", FORMATS)
def test_copies_on_one_rank_are_used_once(fmt: str) -> None:
    # https://github.com/deepseek-ai/EPLB/issues/22
    spec = quantized(layer(seed=32), fmt)
    library, copies = MoECore(), {"phys_to_log": [0, 0, 1, 2, 3, 3]}
    doubled = torch.where((spec["ids"] == 0) | (spec["ids"] == 3), 2.0, 1.0) * spec["wts"]
    parts = [library.rank_part(rank, 2, **spec, eplb=copies) for rank in range(2)]
    require(sum(parts[1:], parts[0]), expect(spec), expect(spec, wts=doubled), limit=QUANTIZED_LIMIT)


@pytest.mark.parametrize("ranks", [{"ep": 3}, {"tp": 4}, {"ep": 2, "tp": 2}], ids=str)
def test_an_expert_of_all_tokens_counts_once_over_ranks(ranks: dict[str, int]) -> None:
    # https://github.com/sgl-project/sglang/pull/26845
    spec, shared = layer(seed=33), {"w13": det((1, 64, 64), 34), "w2": det((1, 64, 32), 35)}
    wanted, routed = RefLib().run(**spec, shared=shared), expect(spec)
    require(MoECore().run(**spec, shared=shared, **ranks), wanted, routed, 2 * wanted - routed)


def test_slots_that_need_no_expert_pass_through() -> None:
    # https://github.com/ml-explore/mlx-lm/pull/508
    spec = layer(seed=36)
    no_expert = spec["ids"] >= 2
    taken = torch.where(no_expert, -1, spec["ids"])
    passed = (spec["wts"] * no_expert).sum(1, keepdim=True) * spec["x"]
    output = MoECore().run(**{**spec, "ids": taken}) + passed
    require(output, expect(spec, ids=taken) + passed, expect(spec) + passed)


# ---- tokens ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", ["plain", "int8", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("tokens", [31, 33, 65])
def test_token_counts_beside_the_usual_tiles(fmt: str, tokens: int) -> None:
    # https://github.com/ml-explore/mlx/issues/3856
    spec = quantized(layer(seed=37, T=tokens), fmt)
    output = MoECore().run(**spec).double()
    assert reference_moe.rel(output, expect(spec)) < QUANTIZED_LIMIT
    assert reference_moe.rel(output[-1:], expect(spec)[-1:]) < QUANTIZED_LIMIT


@pytest.mark.parametrize("fmt", FORMATS)
def test_padding_rows_of_every_format(fmt: str) -> None:
    # https://github.com/sgl-project/sglang/pull/31838
    spec = quantized(layer(seed=38), fmt)
    spec["x"], spec["ids"] = spec["x"].clone(), spec["ids"].clone()
    wanted = expect(spec)[:3]
    spec["x"][3:], spec["ids"][3:], spec["wts"] = math.nan, -1, spec["wts"].clone()
    spec["wts"][3:] = math.nan
    output = MoECore().run(**spec)
    assert (output[3:] == 0).all()
    assert reference_moe.rel(output[:3].double(), wanted) < QUANTIZED_LIMIT


@pytest.mark.parametrize("fmt", ["plain", "nvfp4"])
def test_calls_of_many_sizes_on_one_layer(fmt: str) -> None:
    # https://github.com/vllm-project/vllm/pull/20392
    spec = quantized(layer(seed=39, T=33), fmt)
    built, wanted = MoECore().build(**spec), expect(spec)
    outputs = [(n, built.forward(spec["x"][:n], spec["ids"][:n], spec["wts"][:n])) for n in (0, 1, 33, 5, 2)]
    for count, output in outputs:
        assert output.shape == (count, 64)
        assert not count or reference_moe.rel(output.double(), wanted[:count]) < QUANTIZED_LIMIT


# ---- stored weights --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4"])
def test_blocks_that_a_cut_goes_through(fmt: str) -> None:
    # https://github.com/vllm-project/vllm-ascend/pull/16110
    spec = layer(seed=40, I=96 if fmt != "nvfp4" else 48, bias=True)
    spec = quantized(spec, fmt)
    if fmt == "int4":
        whole = layer(seed=40, I=96, bias=True)["ckpt"]
        spec["ckpt"] |= int_ckpt(whole["w13"], whole["w2"], 4, 32)
    assert error(MoECore().run(**spec, tp=2), spec) < QUANTIZED_LIMIT


def test_four_bit_floats_in_the_order_of_ggml() -> None:
    # https://github.com/kekzl/imp/pull/567
    spec = layer(seed=41)
    stored = mxfp4_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"])
    spec["ckpt"] = stored | {"nibbles": "split"}
    wanted_of_pairs = expect(spec)
    for name in ("w13", "w2"):
        codes = reference_moe.unpack_nibbles(stored[name])
        spec["ckpt"][name] = reference_moe.pack_nibbles(codes, "split")
    require(MoECore().run(**spec), expect(spec), wanted_of_pairs)


def _calibrated(seed: int) -> Spec:
    spec = layer(seed=seed, E=3)
    scales = reference_moe.nvfp4_global(spec["x"]), reference_moe.nvfp4_global(spec["x"] * 8)
    return {**spec, "ckpt": nvfp4_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"], *scales, True)}


@pytest.mark.error_path
@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["w13_scale_2", "w2_scale_2", "w13_input_scale", "w2_input_scale"])
@pytest.mark.parametrize("divides", [False, True], ids=["multipliers", "divisors"])
def test_scales_of_experts_that_were_never_calibrated(name: str, bad: float, divides: bool) -> None:
    # https://github.com/vllm-project/vllm/issues/45212
    spec = _calibrated(42)
    spec["ckpt"][name] = spec["ckpt"][name].clone()
    spec["ckpt"][name][2] = bad
    if divides:
        spec["ckpt"] = as_divisors(spec["ckpt"])
    with pytest.raises(Exception, match=rf"(?s){name.partition('_')[0]}_\w+: expert 2 has "):
        MoECore().build(**spec)


def test_the_largest_activation_scale_is_that_of_all_experts() -> None:
    # https://github.com/sgl-project/sglang/pull/2203
    # As many times the others' that the scales of blocks nearly vanish.
    spec, ours = _calibrated(43), torch.tensor([1.0, 2.0**16, 1.0])
    apart = {**spec, "ckpt": dict(spec["ckpt"])}
    spec["ckpt"]["w13_input_scale"] = spec["ckpt"]["w13_input_scale"] * ours
    require(MoECore().run(**spec, ep=3), expect(spec), expect(apart), limit=QUANTIZED_LIMIT)


@pytest.mark.parametrize("seed", [222, 229, 234])
def test_divisors_that_are_inverses_to_the_last_bit(seed: int) -> None:
    # With fp32 inverses one bit away, inputs beside a tie of e2m1 get the other code.
    spec = _calibrated(seed)
    names = {"w13_scale_2": "w13_global", "w2_scale_2": "w2_global"}
    names |= {"w13_input_scale": "in13_global", "w2_input_scale": "in2_global"}
    exact = {new: 1.0 / spec["ckpt"][old].double() for old, new in names.items()}
    spec["ckpt"] = as_divisors(spec["ckpt"]) | exact
    assert error(MoECore().run(**spec), spec) < LIMIT
