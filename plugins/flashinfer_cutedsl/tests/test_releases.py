"""The plugin on each emulated release: same numbers, nothing left to the environment, sums in the order it declares."""

from __future__ import annotations

import attrs
import pytest
import torch
from cutedsl_layers import B200, DISPATCHERS, small_layer
from moe_plugin_flashinfer.emulation import emulated, unordered_atomics
from moe_plugin_flashinfer.emulation.signatures import RELEASES

from moe_core.testing.examples import ExampleLayer
from moe_core.testing.memory import same_bits

CALLS = 4


def on_release(kernel: str, release: str, **fields: object) -> ExampleLayer:
    """A layer for a machine on which that release is installed."""
    packages = dict(B200.packages) | {"flashinfer": release}
    return small_layer(kernel, attrs.evolve(B200, packages=tuple(packages.items())), **fields)


def outputs(layer: ExampleLayer, calls: int = 1) -> list[torch.Tensor]:
    experts, tokens = layer.bind(), layer.tokens()
    return [experts(*tokens) for _ in range(calls)]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kernel", DISPATCHERS)
def test_each_release_gives_the_answer(kernel: str, release: str) -> None:
    layer = on_release(kernel, release)
    with emulated(release):
        error, limit = layer.error()
    assert error < limit


@pytest.mark.parametrize("kernel", DISPATCHERS)
def test_no_variable_decides_how_scales_are_searched(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = on_release(kernel, RELEASES[-1])
    [before] = outputs(layer)
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    [after] = outputs(layer)
    assert same_bits(before, after)


def test_what_is_declared_deterministic_is_where_additions_have_no_order() -> None:
    layers = {
        "masked": on_release("masked", RELEASES[0], deterministic=True),
        "two stages": on_release("wrapper", RELEASES[-1], deterministic=True, top_k=3),
        "atomic additions": on_release("wrapper", RELEASES[-1], top_k=3),
    }
    with unordered_atomics():
        for name, layer in layers.items():
            first, *others = outputs(layer, CALLS)
            are_same = all(same_bits(first, other) for other in others)
            spec = layer.plan.routes[0].runner.spec
            assert are_same == spec.deterministic == (name != "atomic additions"), name


def test_rows_that_do_not_exist_are_neither_read_nor_written() -> None:
    layer = small_layer("masked")
    experts = layer.bind().routes[0].experts
    dispatch = layer.bind().routes[0].dispatch
    tokens, _ = dispatch(*layer.tokens())
    is_real = torch.arange(tokens.hidden_states.shape[1]) < tokens.masked_m[:, None]
    first = attrs.evolve(tokens, hidden_states=torch.where(is_real[..., None], tokens.hidden_states, torch.nan))
    second = attrs.evolve(tokens, hidden_states=torch.where(is_real[..., None], tokens.hidden_states, 1e30))
    assert same_bits(experts(first)[is_real], experts(second)[is_real])
    assert experts(first)[is_real].isfinite().all()
