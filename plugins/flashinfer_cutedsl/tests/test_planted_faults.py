"""Faults planted in prepared weights and calls: each must come out as wrong numbers, or the emulation proves nothing.

Each is a likely one: the other kernel's layout, exchanged halves, scales in another order than their rows or without
tiles, another interleave, the alpha of the wrong half, a scale inverted or forgotten, nibbles in the other order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cutedsl_layers import DISPATCHERS, INNER, small_layer
from moe_plugin_flashinfer import emulation
from nvfp4_by_hand import in_tiles

from moe_core.bound import BoundExperts
from moe_core.errors import PluginError
from moe_core.payloads import PreparedWeights
from moe_core.testing.examples import ExampleLayer

Tensors = dict[str, torch.Tensor]
#: Prepared tensors, and the checkpoint's -> those that are wrong.
DataFault = Callable[[Tensors, Tensors], Tensors]
#: Keywords of a call -> those that are wrong.
CallFault = Callable[[dict[str, Any]], dict[str, Any]]


def tiles(scales: torch.Tensor) -> torch.Tensor:
    return torch.stack([in_tiles(expert).view(torch.uint8) for expert in scales]).view(scales.dtype)


def rows(order: list[int], *, weights: bool = True, scales: bool = True) -> DataFault:
    """The first projection's rows of the checkpoint in another order."""

    def fault(good: Tensors, raw: Tensors) -> Tensors:
        index, changed = torch.tensor(order), {}
        if weights:
            changed["w13"] = raw["w13"][:, index].contiguous()
        if scales:
            changed["w13_scale"] = tiles(raw["w13_scale"].view(torch.uint8)[:, index].view(torch.float8_e4m3fn))
        return changed

    return fault


def turns(chunk: int, first: int = 1) -> list[int]:
    """Rows of [gate; up] by turns, that of half `first` first."""
    starts = range(0, INNER, chunk)
    return [half * INNER + start + row for start in starts for half in (first, 1 - first) for row in range(chunk)]


def scaled(name: str, factor: Callable[[Tensors], torch.Tensor]) -> DataFault:
    return lambda good, raw: {name: (good[name] * factor(raw)).float()}


def inverted(name: str) -> DataFault:
    return lambda good, raw: {name: 1 / good[name]}


def nibbles(name: str) -> DataFault:
    return lambda good, raw: {name: good[name] << 4 | good[name] >> 4}


def untiled(name: str) -> DataFault:
    return lambda good, raw: {name: raw[name].contiguous()}


def in_other_tiles(name: str) -> DataFault:
    """Four rows of 32 lines taken for 32 rows of four lines."""

    def fault(good: Tensors, raw: Tensors) -> Tensors:
        stored = good[name].view(torch.uint8)
        turned = stored.reshape(-1, 32, 4, 4).transpose(1, 2).reshape(stored.shape)
        return {name: turned.contiguous().view(torch.float8_e4m3fn)}

    return fault


def as_copied_view(name: str) -> DataFault:
    """The six-dimensional view made contiguous, as if its memory did not matter."""

    def fault(good: Tensors, raw: Tensors) -> Tensors:
        stored = good[name].view(torch.uint8)
        count, number, width = stored.shape
        view = stored.view(count, number // 128, width // 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
        return {name: view.contiguous().view(stored.shape).view(torch.float8_e4m3fn)}

    return fault


def of_neighbours(name: str) -> DataFault:
    return lambda good, raw: {name: good[name].roll(1, 0)}


def up_over_gate(raw: Tensors) -> torch.Tensor:
    return raw["w13_global_scale"][:, 1] / raw["w13_global_scale"][:, 0]


STORED, SWAPPED = list(range(2 * INNER)), [*range(INNER, 2 * INNER), *range(INNER)]
BOTH: dict[str, DataFault] = {
    "scales of the first projection without tiles": untiled("w13_scale"),
    "scales of the second projection without tiles": untiled("w2_scale"),
    "tiles turned": in_other_tiles("w13_scale"),
    "a contiguous copy of the view of scales": as_copied_view("w2_scale"),
    "odd elements first": nibbles("w13"),
    "odd elements first in the second projection": nibbles("w2"),
    "the scale of tokens inverted": inverted("x_scale"),
    "the scale of the activation inverted": inverted("hidden_scale"),
    "no alpha": lambda good, raw: {"w13_alpha": torch.ones_like(good["w13_alpha"])},
    "alphas exchanged": lambda good, raw: {"w13_alpha": good["w2_alpha"], "w2_alpha": good["w13_alpha"]},
    "the alpha of another expert": of_neighbours("w13_alpha"),
    "the second alpha of another expert": of_neighbours("w2_alpha"),
    "scales of another expert": of_neighbours("w13_scale"),
}
DATA: dict[str, dict[str, DataFault]] = {
    "masked": BOTH
    | {
        "halves exchanged": rows(SWAPPED),
        "halves exchanged, scales as stored": rows(SWAPPED, scales=False),
        "rows by turns, for the other kernel": rows(turns(64)),
        "the alpha of the up half": scaled("w13_alpha", up_over_gate),
        "one scale of the activation for both halves": scaled("hidden_scale", lambda raw: 1 / up_over_gate(raw)),
        "the ratio of halves inverted": scaled("hidden_scale", lambda raw: up_over_gate(raw) ** -2),
        "the scale of tokens of another expert": of_neighbours("x_scale"),
    },
    "wrapper": BOTH
    | {
        "rows as stored, for the other kernel": rows(STORED),
        "halves by turns, gate first": rows(turns(64, first=0)),
        "turns of 32 rows": rows(turns(32)),
        "turns of one row": rows(turns(1)),
        "rows by turns, scales as stored": rows(STORED, weights=False),
        "halves exchanged, but not by turns": rows(SWAPPED),
        "alphas of the up half in both halves' place": scaled("w13_alpha", lambda raw: up_over_gate(raw) + 1),
    },
}
CASES = [(kernel, name) for kernel, faults in DATA.items() for name in faults]


def with_fault(layer: ExampleLayer, fault: DataFault) -> PreparedWeights:
    prepared = layer.prepare()
    good = {name: tensor.data for name, tensor in prepared.tensors.items()}
    changed = fault(good, layer.raw.tensors)
    for name, tensor in changed.items():
        assert tensor.shape == good[name].shape, "the fault would show in a shape"
        prepared.tensors[name].data = tensor
    return prepared


def require_wrong(layer: ExampleLayer, experts: BoundExperts | None = None) -> None:
    """Far from what rounding explains; NaN is wrong as well."""
    error, limit = layer.error(experts)
    assert not error < 3 * limit, f"error {error:.2g} does not stand out from rounding, {limit:.2g}"


@pytest.mark.parametrize("kernel", DISPATCHERS)
def test_without_a_fault_the_numbers_are_right(kernel: str) -> None:
    layer = small_layer(kernel)
    error, limit = layer.error()
    assert error < limit
    # Where halves differ the plugin has something to repair.
    assert not torch.allclose(up_over_gate(layer.raw.tensors), torch.ones(()))


@pytest.mark.parametrize(("kernel", "name"), CASES, ids=[f"{kernel}: {name}" for kernel, name in CASES])
def test_a_fault_in_prepared_weights_gives_wrong_numbers(kernel: str, name: str) -> None:
    layer = small_layer(kernel)
    require_wrong(layer, layer.bind(with_fault(layer, DATA[kernel][name])))


GEMM, WRAPPER = "gemm.grouped_gemm_nt_masked", "fused_moe.CuteDslMoEWrapper"
CALLS: dict[str, tuple[str, str, CallFault]] = {
    "the scales of the weights for those of the tokens": (
        *("masked", GEMM),
        lambda call: call | {"lhs": (call["lhs"][0], call["rhs"][1])},
    ),
    "no alpha": ("masked", GEMM, lambda call: call | {"alpha": None, "alpha_dtype": None}),
    "no row": ("masked", GEMM, lambda call: call | {"masked_m": torch.zeros_like(call["masked_m"])}),
    "tokens rounded with the other scale": (
        *("masked", "scaled_fp4_grouped_quantize"),
        lambda call: call | {"a_global_sf": 1 / call["a_global_sf"]},
    ),
    "the activation of exchanged halves": (
        *("masked", "silu_and_mul_scaled_nvfp4_experts_quantize"),
        lambda call: call | {"a": call["a"].roll(INNER, -1)},
    ),
    "scales of tokens in tiles": (
        *("wrapper", "fp4_quantize"),
        lambda call: call | {"is_sf_swizzled_layout": True},
    ),
    "experts of another rank": ("wrapper", WRAPPER, lambda call: call | {"local_expert_offset": 1}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_fault_in_a_call_gives_wrong_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, function, fault = CALLS[name]
    found = emulation.find

    def find(asked: str) -> Callable[..., Any]:
        right = found(asked)
        if asked != function:
            return right

        def wrong(**call: Any) -> Any:
            return right(**fault(call))

        wrong.__signature__ = right.__signature__  # type: ignore[attr-defined]
        return wrong

    monkeypatch.setattr(emulation, "find", find)
    require_wrong(small_layer(kernel))


@pytest.mark.error_path
def test_weights_of_the_other_kernel_are_refused_by_name_and_would_give_other_numbers() -> None:
    layers = {kernel: small_layer(kernel, intermediate_size=256) for kernel in DISPATCHERS}
    for kernel, other in (("masked", "wrapper"), ("wrapper", "masked")):
        layer, foreign = layers[kernel], layers[other].prepare()
        with pytest.raises(PluginError, match=rf"'cutedsl_{kernel}'.*'cutedsl_{other}'"):
            layer.bind(foreign)
        own = layer.prepare()
        for name, tensor in foreign.tensors.items():
            if tensor.data.shape == own[name].shape:
                own.tensors[name].data = tensor.data
        require_wrong(layer, layer.bind(own))
