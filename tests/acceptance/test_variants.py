"""Specs that the oracle takes and no case has: the adapter must neither refuse nor misread them."""

from __future__ import annotations

from typing import Any

import pytest
import reference_moe
import torch
from adapter import MoECore
from case_lib import RefLib, expect, fp8_ckpt, int_ckpt, mxfp4_ckpt, nvfp4_ckpt, plain
from cases_open import _Peak

from moe_core.errors import InputError

Spec = dict[str, Any]

#: As the cases have it, for bf16 and for quantized layers.
LIMIT, QUANTIZED_LIMIT = 2e-2, 8e-2


def layer(seed: int = 1, **sizes: Any) -> Spec:
    return plain(**{"T": 6, "H": 64, "I": 64, "E": 4, "seed": seed, **sizes})


def quantized(spec: Spec, fmt: str) -> Spec:
    """The spec with its weights in a format of the cases."""
    w13, w2 = spec["ckpt"]["w13"], spec["ckpt"]["w2"]
    scales = reference_moe.nvfp4_global(spec["x"]), reference_moe.nvfp4_global(spec["x"] * 8)
    make = {
        "plain": lambda: spec["ckpt"],
        "fp8_block": lambda: fp8_ckpt(w13, w2, (64, 64)),
        "int8": lambda: int_ckpt(w13, w2, 8),
        "int4": lambda: int_ckpt(w13, w2, 4),
        "mxfp4": lambda: mxfp4_ckpt(w13, w2),
        "nvfp4": lambda: nvfp4_ckpt(w13, w2, *scales, True),
        "nvfp4_ct": lambda: as_divisors(nvfp4_ckpt(w13, w2, *scales, True)),
        "nvfp4_w4a16": lambda: nvfp4_ckpt(w13, w2, shared_global=True) | {"weight_only": True},
        "fp8_tensor": lambda: fp8_tensor_ckpt(w13, w2),
    }
    return {**spec, "ckpt": {**spec["ckpt"], **make[fmt]()}}


def as_divisors(ckpt: Spec) -> Spec:
    """ModelOpt's scales as compressed-tensors has them."""
    names = {"w13_scale_2": "w13_global", "w2_scale_2": "w2_global"}
    names |= {"w13_input_scale": "in13_global", "w2_input_scale": "in2_global"}
    kept = {name: value for name, value in ckpt.items() if name not in names}
    return kept | {new: 1.0 / ckpt[old] for old, new in names.items()} | {"fmt": "nvfp4_ct"}


def fp8_tensor_ckpt(w13: torch.Tensor, w2: torch.Tensor, *, scale_of_up: float = 1.0) -> Spec:
    """One scale per expert, for the second half of w13 times a power of two with codes that much smaller."""
    rounded = {"w13": reference_moe.quant_fp8_tensor(w13), "w2": reference_moe.quant_fp8_tensor(w2)}
    codes = {name: reference_moe.encode_e4m3fn(value.q) for name, value in rounded.items()}
    half = w13.shape[1] // 2
    codes["w13"][:, half:] = reference_moe.encode_e4m3fn(rounded["w13"].q[:, half:] / scale_of_up)
    scales = {name: value.scale[:, 0].float() for name, value in rounded.items()}
    both = scales["w13"] * torch.tensor([1.0, scale_of_up])
    return {**codes, "fmt": "fp8_tensor", "w13_scale": both, "w2_scale": scales["w2"][:, 0]}


def error(output: torch.Tensor, spec: Spec) -> float:
    return reference_moe.rel(output.double(), expect(spec))


FORMATS = ("plain", "fp8_block", "fp8_tensor", "int8", "int4", "mxfp4", "nvfp4", "nvfp4_ct", "nvfp4_w4a16")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("without", [None, "b13", "b2"])
def test_biases_of_every_format(fmt: str, without: str | None) -> None:
    spec = quantized(layer(bias=True), fmt)
    spec["ckpt"].pop(without, None)
    assert error(MoECore().run(**spec), spec) < QUANTIZED_LIMIT


@pytest.mark.parametrize("order", ["up_gate", "interleaved"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tp", [1, 2])
def test_row_orders_of_every_format(order: str, fmt: str, tp: int) -> None:
    spec = layer(seed=2, bias=True)
    w13 = spec["ckpt"]["w13"]
    gate, up = w13[:, :64], w13[:, 64:] * 4
    rows = torch.cat([up, gate], 1) if order == "up_gate" else torch.stack([gate, up], 2).flatten(1, 2)
    spec = quantized({**spec, "ckpt": {**spec["ckpt"], "w13": rows}}, fmt)
    spec["ckpt"]["layout"] = order
    assert error(MoECore().run(**spec, tp=tp), spec) < QUANTIZED_LIMIT


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("block", [(32, 64), (64, 32), (128, 1)])
def test_turned_tiles_that_are_not_square(order: str, block: tuple[int, int]) -> None:
    spec = layer(seed=3, I=96)
    turned = {name: spec["ckpt"][name].mT.contiguous() for name in ("w13", "w2")}
    spec["ckpt"] = {**fp8_ckpt(*turned.values(), block), "layout": order, "orientation": "in_out"}
    assert error(MoECore().run(**spec), spec) < QUANTIZED_LIMIT


def test_biases_beside_scales_of_alternating_rows() -> None:
    spec = layer(seed=11, bias=True)
    spec["ckpt"] |= fp8_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"], (1, 64)) | {"layout": "interleaved"}
    assert error(MoECore().run(**spec), spec) < QUANTIZED_LIMIT


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("tp", [1, 2])
def test_halves_with_scales_of_their_own(order: str, tp: int) -> None:
    # https://github.com/vllm-project/vllm-gaudi/pull/720
    spec = layer(seed=12)
    tensors = fp8_tensor_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"], scale_of_up=1 / 4)
    one_scale = {**tensors, "w13_scale": tensors["w13_scale"][:, :1].repeat(1, 2)}
    spec["ckpt"] |= tensors | {"layout": order}
    assert reference_moe.rel(expect({**spec, "ckpt": spec["ckpt"] | one_scale}), expect(spec)) > 2 * QUANTIZED_LIMIT
    assert error(MoECore().run(**spec, tp=tp), spec) < QUANTIZED_LIMIT


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("activation", ["relu2", "gelu"])
def test_experts_without_gate(fmt: str, activation: str) -> None:
    # https://github.com/charlie12345/ROCmFPX/issues/85; what has no halves still has two scales in these formats.
    spec = quantized(layer(seed=13, activation=activation, bias=True), fmt)
    assert error(MoECore().run(**spec, tp=2), spec) < QUANTIZED_LIMIT
    # The order of gate and up rows says nothing about them.
    assert error(MoECore().run(**{**spec, "ckpt": {**spec["ckpt"], "layout": "up_gate"}}), spec) < QUANTIZED_LIMIT


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("top_k", [1, 2])
def test_weighted_inputs_are_rounded_once(fmt: str, top_k: int) -> None:
    # https://github.com/sgl-project/sglang/pull/35504
    spec = quantized(layer(seed=14, T=16, K=top_k), fmt)
    spec |= {"weight_on_input": True, "wts": 0.25 + reference_moe.det((16, top_k), 9).abs()}
    assert error(MoECore().run(**spec), spec) < LIMIT


@pytest.mark.parametrize("block", [(64, 64), (1, 32), (128, 128)])
def test_power_of_two_scales_cost_one_rounding(block: tuple[int, int]) -> None:
    # https://github.com/sgl-project/sglang/pull/16622
    spec = layer(seed=15, I=128)
    spec["ckpt"] |= fp8_ckpt(spec["ckpt"]["w13"] * 0.7, spec["ckpt"]["w2"] * 0.6, block) | {"ue8m0": True}
    assert error(MoECore().run(**spec), spec) < LIMIT


@pytest.mark.parametrize("slots", [0, 1, 3, 9])
def test_any_number_of_slots(slots: int) -> None:
    library, spec = MoECore(), layer(seed=16)
    ids = torch.arange(6 * slots).reshape(6, slots) % 4
    other = {**spec, "ids": ids, "wts": torch.rand(6, slots, generator=torch.Generator().manual_seed(slots)).double()}
    for output in (library.run(**other), library.build(**spec).forward(spec["x"], other["ids"], other["wts"])):
        assert output.shape == spec["x"].shape
        assert error(output, other) < LIMIT or not slots


def test_a_layer_built_from_a_checkpoint_alone() -> None:
    spec = layer(seed=17, bias=True)
    alone = {name: spec[name] for name in ("activation", "num_experts", "ckpt")}
    for built in (MoECore().build(**alone), MoECore().build(**alone, tp=2)):
        built.reload(spec["ckpt"])
        assert error(built.forward(spec["x"], spec["ids"], spec["wts"]), spec) < LIMIT
        assert built.parameters()


@pytest.mark.parametrize("activation", ["swiglu_oai", "swiglu_limit", "swiglu_step"])
@pytest.mark.parametrize("limit", [0.5, 7.0, float("inf")])
def test_limits_are_those_of_routed_experts(activation: str, limit: float) -> None:
    # https://github.com/jundot/omlx/pull/2571
    spec = {**layer(seed=18, activation=activation), "limit": limit}
    spec["x"] = spec["x"] * 16
    assert error(MoECore().run(**spec), spec) < LIMIT
    shared = {"w13": reference_moe.det((1, 128, 64), 19), "w2": reference_moe.det((1, 64, 64), 20)}
    wanted = RefLib().run(**spec, shared=shared)
    assert reference_moe.rel(MoECore().run(**spec, shared=shared).double(), wanted) < LIMIT


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != "fp8_block"])
def test_weights_are_copied_once(order: str, fmt: str) -> None:
    # https://github.com/vllm-project/vllm/issues/53629
    spec = quantized(layer(seed=21, E=32, H=128), fmt)
    spec["ckpt"] |= {"layout": order, "nibbles": "high_first" if order == "gate_up" else "low_first"}
    if fmt == "plain":
        spec["ckpt"] |= {name: spec["ckpt"][name].bfloat16() for name in ("w13", "w2")}
    stored = sum(tensor.nbytes for tensor in spec["ckpt"].values() if isinstance(tensor, torch.Tensor))
    with _Peak() as memory:
        MoECore().build(**spec)
    # What is read in another order lies there once more until the layer has it.
    assert memory.peak <= 1.5 * stored


def test_inverses_of_divisors_make_no_ties() -> None:
    # As its largest token, 126 / 128 has a scale that fp32 holds exactly; its divisor's inverse is another number.
    spec = layer(seed=22)
    spec["x"] = spec["x"].clamp(-126 / 128, 126 / 128)
    spec = quantized(spec, "nvfp4_ct")
    assert error(MoECore().run(**spec), spec) < LIMIT


@pytest.mark.parametrize("nibbles", ["low_first", "high_first", "split"])
@pytest.mark.parametrize("sign", ["twos", "offset8"])
def test_nibbles(nibbles: str, sign: str) -> None:
    spec = layer(seed=4)
    spec["ckpt"] = int_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"], 4, 32, sign, nibbles)
    assert error(MoECore().run(**spec), spec) < QUANTIZED_LIMIT


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("places", [[2, 0, 3, 1], [0, 1, 2, 3, 3, 0, 1]])
def test_checkpoints_that_say_what_lies_in_which_place(fmt: str, places: list[int]) -> None:
    spec = quantized(layer(seed=5), fmt)
    spec["ckpt"]["p2l"] = torch.tensor(places)
    spec["ids"] = torch.tensor([[0, len(places) - 1]]) - torch.zeros(6, 1, dtype=torch.int64)
    library, moved = MoECore(), {**spec["ckpt"], "p2l": torch.tensor(places[::-1])}
    built = library.build(**spec)
    inputs = spec["x"], spec["ids"], spec["wts"]
    assert error(built.forward(*inputs), spec) < QUANTIZED_LIMIT
    # Weights and scales follow the experts to their new places.
    assert reference_moe.rel(expect({**spec, "ckpt": moved}), expect(spec)) > 2 * QUANTIZED_LIMIT
    built.reload(moved)
    assert error(built.forward(*inputs), {**spec, "ckpt": moved}) < QUANTIZED_LIMIT
    assert error(library.run(**spec, ep=2), spec) < QUANTIZED_LIMIT


@pytest.mark.parametrize("ep", [2, 3, 5])
def test_ranks_of_both_kinds_add_up(ep: int) -> None:
    spec = layer(seed=6, bias=True)
    assert error(MoECore().run(**spec, ep=ep, tp=2), spec) < LIMIT


def test_any_negative_id_is_padding_and_any_integer_is_an_id() -> None:
    spec = layer(seed=7)
    spec["ids"] = torch.where(spec["ids"] == 2, -7, spec["ids"]).to(torch.int16)
    assert error(MoECore().run(**spec), spec) < LIMIT


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_default_device_of_the_caller_does_not_matter(fmt: str) -> None:
    spec = quantized(layer(seed=10), fmt)
    with torch.device("meta"):
        output = MoECore().run(**spec)
    assert error(output, spec) < QUANTIZED_LIMIT


@pytest.mark.error_path
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("missing", ["w13", "w2"])
def test_a_missing_weight_is_named(fmt: str, missing: str) -> None:
    library, spec = MoECore(), quantized(layer(seed=8), fmt)
    incomplete = {**spec["ckpt"], missing: None}
    with pytest.raises(Exception, match=rf"(?m)^  {missing}: missing"):
        library.build(**{**spec, "ckpt": incomplete})
    built = library.build(**spec)
    before = built.forward(spec["x"], spec["ids"], spec["wts"])
    with pytest.raises(Exception, match=rf"(?m)^  {missing}: missing"):
        built.reload(incomplete)
    assert torch.equal(built.forward(spec["x"], spec["ids"], spec["wts"]), before)


@pytest.mark.error_path
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_that_are_no_halves_are_named(fmt: str) -> None:
    spec = quantized(layer(seed=23), fmt)
    spec["ckpt"]["w13"] = spec["ckpt"]["w13"][:, :-1]
    with pytest.raises(Exception, match=r"(?m)^  w13: expected \[4, 128, .* got \[4, 127, "):
        MoECore().build(**spec)


@pytest.mark.error_path
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_codes_are_not_numbers(dtype: torch.dtype) -> None:
    spec = layer(seed=9)
    codes = fp8_ckpt(spec["ckpt"]["w13"], spec["ckpt"]["w2"])["w13"].view(dtype)
    with pytest.raises(Exception, match=rf"w13: expected \[4, 128, 64\] bfloat16, got .*{dtype}".replace("torch.", "")):
        MoECore().build(**{**spec, "ckpt": {**spec["ckpt"], "w13": codes}})


@pytest.mark.parametrize("name", ["none", *reference_moe.SCHEMES, "plain", "int8", "int4", "nvfp4_ct"])
def test_schemes_by_the_names_of_the_oracle(name: str) -> None:
    assert MoECore().select(name, {"type": "cpu"})[1:] == ("torch", name)


@pytest.mark.error_path
@pytest.mark.parametrize("device", [{"type": "cpu"}, {"type": "cuda", "sm": 75}])
def test_every_runner_that_may_be_chosen_is_explained(device: Spec) -> None:
    # https://github.com/vllm-project/vllm/issues/45661
    runners = list(MoECore.restricted_runners)
    found = device.get("sm", device["type"])
    with pytest.raises(ValueError, match=rf"(?s)({runners[0]}|{runners[1]}).*found (sm)?{found}") as caught:
        MoECore().select("none", {**device, "only": runners})
    assert all(runner in str(caught.value) for runner in runners)


@pytest.mark.error_path
def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'no_such'; known: swiglu, "):
        MoECore().run(**{**layer(), "activation": "no_such"})


@pytest.mark.error_path
@pytest.mark.parametrize(("field", "known"), [("sign", "twos, offset8"), ("nibbles", "low_first, high_first, split")])
def test_unknown_words_of_a_checkpoint_are_named(field: str, known: str) -> None:
    spec = quantized(layer(), "int4")
    with pytest.raises(ValueError, match=rf"unknown {field} 'no_such'; known: {known}"):
        MoECore().build(**{**spec, "ckpt": {**spec["ckpt"], field: "no_such"}})


@pytest.mark.error_path
def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'float64'; known: float32, bfloat16, float16"):
        MoECore().build(**layer(), dtype="float64")


@pytest.mark.error_path
def test_an_unknown_runner_has_no_requirements() -> None:
    with pytest.raises(ValueError, match=r"unknown runner 'no_such'; known: torch, "):
        MoECore().requirements("no_such")


@pytest.mark.error_path
@pytest.mark.parametrize("kind", ["tp", "ep"])
@pytest.mark.parametrize("ranks", [0, -1, True, 2.0])
def test_numbers_of_ranks_that_are_none_are_named(kind: str, ranks: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind}: expected a number of ranks, 1 or more, got {ranks}"):
        MoECore().run(**layer(), **{kind: ranks})


@pytest.mark.error_path
def test_no_tensor_parallel_rank_builds_nothing() -> None:
    with pytest.raises(ValueError, match="tp: expected a number of ranks, 1 or more, got 0"):
        MoECore().build(**layer(), tp=0)


@pytest.mark.error_path
@pytest.mark.parametrize(("name", "expected"), [("x", "H"), ("ids", "slots")])
def test_tokens_that_are_no_matrix_are_named(name: str, expected: str) -> None:
    spec = layer()
    with pytest.raises(ValueError, match=rf"{name}: expected \[tokens, {expected}\], got \[\d+\]"):
        MoECore().run(**{**spec, name: spec[name].flatten()})


@pytest.mark.error_path
@pytest.mark.parametrize("names", [("x",), ("ids",), ("wts",), ("ids", "wts"), ("x", "ids", "wts")], ids=" ".join)
def test_a_built_layer_names_tokens_that_are_no_matrix(names: tuple[str, ...]) -> None:
    spec = layer()
    tokens = {name: spec[name].flatten() if name in names else spec[name] for name in ("x", "ids", "wts")}
    first = {"x": "hidden_states", "ids": "topk_ids", "wts": "topk_weights"}[names[0]]
    with pytest.raises(InputError, match=first):
        MoECore().build(**spec).forward(*tokens.values())
