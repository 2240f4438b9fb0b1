"""Specs that nobody wrote down: formats, layouts, activations, ids and ranks drawn together, against the oracle.

A fault in one argument mostly has a case. These look for faults where two of them meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference_moe
import torch
from adapter import MoECore
from case_lib import RefLib, expect, fp8_ckpt, int_ckpt, mxfp4_ckpt, nvfp4_ckpt
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_variants import LIMIT, QUANTIZED_LIMIT, as_divisors, fp8_tensor_ckpt

Spec = dict[str, Any]

#: Tensor-parallel ranks round activations in groups of their own; what is cut or added wrongly is off by more.
RANKS_LIMIT = 0.25

BLOCKS = [(128, 128), (64, 64), (32, 64), (1, 32), (24, 24)]


def _values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Multiples of 1/128 below 1, exact in every dtype of a layer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator).double() / 128


def _ordered(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """`[E, 2I, ...]` with gate rows before up rows, in the order of a checkpoint."""
    gate, up = rows.chunk(2, 1)
    orders = {
        "gate_up": lambda: rows,
        "up_gate": lambda: torch.cat([up, gate], 1),
        "interleaved": lambda: torch.stack([gate, up], 2).flatten(1, 2),
    }
    return orders[layout]()


def _stored(draw: Callable[[Any], Any], fmt: str, w13: torch.Tensor, w2: torch.Tensor, halves: bool) -> Spec:
    """The weights in a format, with what the format leaves open."""
    if fmt == "fp8_block":
        return fp8_ckpt(w13, w2, draw(st.sampled_from(BLOCKS)))
    if fmt == "fp8_tensor":
        return fp8_tensor_ckpt(w13, w2, scale_of_up=draw(st.sampled_from([1.0, 0.25])) if halves else 1.0)
    if fmt in ("int8", "int4"):
        group, sign = draw(st.sampled_from([None, 16, 24, 128])), draw(st.sampled_from(["twos", "offset8"]))
        return int_ckpt(w13, w2, int(fmt[3:]), group, sign, draw(st.sampled_from(["low_first", "high_first", "split"])))
    if fmt == "mxfp4":
        return mxfp4_ckpt(w13, w2)
    # The largest token is no multiple of the scale, which would make ties of codes common.
    scales = 1.0371 / 2688, 0.0077
    stored = nvfp4_ckpt(w13, w2, *scales, shared_global=not halves) | {"weight_only": draw(st.booleans())}
    return as_divisors(stored) if fmt == "nvfp4_ct" else stored


@st.composite
def specs(draw: Callable[[Any], Any]) -> tuple[Spec, Spec]:
    """A spec, and the ranks and placement to run it with."""
    seed = draw(st.integers(0, 2**20))
    tokens, num_experts = draw(st.sampled_from([4, 5, 9])), draw(st.integers(1, 6))
    top_k = min(num_experts, draw(st.integers(1, 3)))
    fmt = draw(
        st.sampled_from(["plain", "fp8_block", "fp8_tensor", "int8", "int4", "mxfp4", "nvfp4_modelopt", "nvfp4_ct"])
    )
    hidden, inner = draw(st.sampled_from([32, 40, 66, 96, 130])), draw(st.sampled_from([16, 24, 32, 40, 72, 96]))
    activation = draw(st.sampled_from([*reference_moe.GATED, *reference_moe.NOT_GATED]))
    gated = activation in reference_moe.GATED
    layout = draw(st.sampled_from(["gate_up", "up_gate", "interleaved"])) if gated else "gate_up"
    w13, w2 = _values((num_experts, inner * (1 + gated), hidden), seed), _values((num_experts, hidden, inner), seed + 1)
    b13, b2 = 4 * _values(w13.shape[:2], seed + 2), 4 * _values((num_experts, hidden), seed + 3)
    if gated:
        w13 = _ordered(w13, layout)
        # The oracle has biases in the order of the layer, but for alternating rows.
        b13 = _ordered(b13, layout if layout == "interleaved" else "gate_up")
    turned = fmt in ("plain", "fp8_block") and draw(st.booleans())
    if turned:
        w13, w2 = w13.mT.contiguous(), w2.mT.contiguous()
    ckpt = {"fmt": "plain", "w13": w13, "w2": w2}
    if fmt != "plain":
        ckpt = _stored(draw, fmt, w13, w2, gated and layout != "interleaved")
    ckpt |= {"layout": layout, "orientation": "in_out" if turned else "out_in"}
    if draw(st.booleans()):
        ckpt |= draw(st.sampled_from([{"b13": b13, "b2": b2}, {"b13": b13}, {"b2": b2}]))
    spec = {
        "activation": activation,
        "num_experts": num_experts,
        "ckpt": ckpt,
        "dtype": draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        "weight_on_input": draw(st.booleans()),
        "limit": draw(st.sampled_from([1.0, 7.0, math.inf])),
        "alpha": draw(st.sampled_from([1.3, 1.702])),
        "deterministic": draw(st.booleans()),
    }
    spec |= _tokens(draw, tokens, hidden, num_experts, top_k, seed)
    return spec, _ranks(draw, num_experts, inner)


def _tokens(draw: Callable[[Any], Any], tokens: int, hidden: int, num_experts: int, top_k: int, seed: int) -> Spec:
    """Tokens and their routing, of which some slots may have no expert and anything for a weight."""
    generator = torch.Generator().manual_seed(seed + 4)
    ids = torch.randint(0, num_experts, (tokens, top_k), generator=generator)
    wts = torch.randint(8, 128, (tokens, top_k), generator=generator).double() / 128
    x = _values((tokens, hidden), seed + 5)
    if draw(st.booleans()):
        empty = torch.rand((tokens, top_k), generator=generator) < 0.3
        empty[0] = False
        ids, wts = torch.where(empty, draw(st.sampled_from([-1, -7])), ids), torch.where(empty, math.nan, wts)
        x = torch.where((ids < 0).all(1, keepdim=True), math.nan, x)
    return {"x": x, "ids": ids.to(draw(st.sampled_from([torch.int64, torch.int32]))), "wts": wts}


def _ranks(draw: Callable[[Any], Any], num_experts: int, inner: int) -> Spec:
    ranks: Spec = {
        "ep": draw(st.sampled_from([1, 2, 3, num_experts + 1])),
        "tp": draw(st.sampled_from([tp for tp in (1, 1, 2, 3, 4) if inner % (2 * tp) == 0])),
    }
    if draw(st.booleans()):
        copies = draw(st.lists(st.integers(0, num_experts - 1), max_size=3))
        ranks["eplb"] = {"phys_to_log": draw(st.permutations([*range(num_experts), *copies]))}
    return ranks


def _limit(ckpt: Spec, ranks: Spec) -> float:
    if ckpt["fmt"] in ("plain", "mxfp4") or ckpt.get("weight_only"):
        return LIMIT
    return RANKS_LIMIT if ranks["tp"] > 1 else QUANTIZED_LIMIT


_DRAWN = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@_DRAWN
@given(specs())
def test_any_spec(drawn: tuple[Spec, Spec]) -> None:
    spec, ranks = drawn
    wanted = expect(spec)
    output = MoECore().run(**spec, **ranks).double()
    assert output.shape == wanted.shape
    assert reference_moe.rel(output, wanted) < _limit(spec["ckpt"], ranks)
    without_expert = (spec["ids"] < 0).all(1)
    assert (output[without_expert] == 0).all()


class _SecondBiasOfEachRank(RefLib):
    """Adds the second bias once more where channels are cut."""

    def run(self, **spec: Any) -> torch.Tensor:
        ckpt, tp = spec["ckpt"], spec.pop("tp")
        return expect({**spec, "ckpt": ckpt if ckpt.get("b2") is None else {**ckpt, "b2": tp * ckpt["b2"]}})


class _WeighsOutputs(RefLib):
    """Has the router's weights on outputs alone."""

    def run(self, **spec: Any) -> torch.Tensor:
        return expect({**spec, "weight_on_input": False})


@pytest.mark.parametrize("wrong_library", [_SecondBiasOfEachRank, _WeighsOutputs])
def test_a_wrong_library_is_found(wrong_library: Callable[[], RefLib]) -> None:
    # The smallest such spec is not asked for.
    @settings(_DRAWN, phases=[Phase.generate], database=None)
    @given(specs())
    def is_right(drawn: tuple[Spec, Spec]) -> None:
        spec, ranks = drawn
        assert reference_moe.rel(wrong_library().run(**spec, **ranks), expect(spec)) < _limit(spec["ckpt"], ranks)

    with pytest.raises(AssertionError):
        is_right()
