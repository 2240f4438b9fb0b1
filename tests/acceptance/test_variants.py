"""Specs that the oracle takes and no case has: the adapter must neither refuse nor misread them."""

from __future__ import annotations

from typing import Any

import pytest
import reference_moe
import torch
from adapter import MoECore
from case_lib import expect, fp8_ckpt, int_ckpt, mxfp4_ckpt, nvfp4_ckpt, plain

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
    }
    return {**spec, "ckpt": {**spec["ckpt"], **make[fmt]()}}


def error(output: torch.Tensor, spec: Spec) -> float:
    return reference_moe.rel(output.double(), expect(spec))


FORMATS = ("plain", "fp8_block", "int8", "int4", "mxfp4", "nvfp4")


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
def test_an_unknown_runner_has_no_requirements() -> None:
    with pytest.raises(ValueError, match=r"unknown runner 'no_such'; known: torch, "):
        MoECore().requirements("no_such")
