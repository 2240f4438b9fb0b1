"""Faults planted in the layouts: each one must come out as wrong numbers, or the emulated run proves nothing.

Every fault is a likely one: a transpose left out or doubled, nibbles in the other order, a sign that is lost or spills
over, scales converted instead of reinterpreted, tiles in another order, the gate taken from the wrong half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_plugin_ascend import experts, layouts, operators, plugin, weights
from moe_plugin_ascend.emulation import formats, kernels

from moe_core.backends.torch import plugin as torch_plugin
from moe_core.bound import BoundExperts
from moe_core.environment import PRESETS
from moe_core.manager import BackendManager
from moe_core.planner import make_plan
from moe_core.quant import BF16, W4A4_INT4, W4A8_INT8, W8A8_INT8, QuantScheme
from moe_core.request import LayerRequest
from moe_core.testing.compare import layer_error
from moe_core.testing.stored import draw_layer
from moe_core.testing.tolerance import tolerance

pytestmark = pytest.mark.usefixtures("emulation")
Patch = Callable[[pytest.MonkeyPatch], None]
HIDDEN, INNER = 128, 128
_unpack_int4 = layouts.unpack_int4
_INT4 = (W4A8_INT8, W4A4_INT4)
_ALL = (BF16, W8A8_INT8, *_INT4)


def error_and_limit(scheme: QuantScheme) -> tuple[float, float]:
    """Relative error of a layer on the emulated operators, and what rounding explains."""
    manager = BackendManager()
    manager.register("torch", torch_plugin)
    manager.register("ascend_npu", plugin)
    request = LayerRequest(
        num_experts=4,
        top_k=2,
        hidden_size=HIDDEN,
        intermediate_size=INNER // 2 if scheme == BF16 else INNER,
        quant=scheme,
        a2a_backend="none",
    )
    plan, _ = make_plan(manager, request, PRESETS["ascend-a3"])
    stored = draw_layer(request)
    raw = stored.raw(request.local_experts(0), "cpu")
    layer = BoundExperts(plan, manager.process_weights(plan, raw, None), manager)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(17, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.rand(17, 4, generator=generator).topk(2, dim=1).indices
    router = torch.rand(17, 2, generator=generator) + 0.25
    limit = tolerance(request, plan.routes[0].token_dtype)
    tokens = hidden, ids, router
    return layer_error(layer(*tokens), stored.reference, tokens, limit), limit


def replaced(module: Any, name: str, function: Callable[..., Any]) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(module, name, function)


def packed(low: int, high: int, keep_sign: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    def pack(values: torch.Tensor) -> torch.Tensor:
        first = values[..., low::2]
        return (first if keep_sign else first & 15) | (values[..., high::2] << 4)

    return pack


def without_sign(stored: torch.Tensor) -> torch.Tensor:
    """Nibbles read as 0 .. 15, and what is above 7 cut off."""
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2).clamp(max=7).to(torch.int8)


def swapped_nibbles(stored: torch.Tensor) -> torch.Tensor:
    return _unpack_int4((stored << 4) | (stored >> 4))


def rows_before_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Tiles in the order of their rows first."""
    *lead, rows, columns = matrix.shape
    width = 32 // matrix.dtype.itemsize
    return matrix.reshape(*lead, rows // 16, 16, columns // width, width).transpose(-3, -2).contiguous()


def transposed_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """Columns before rows inside each tile."""
    laid_out = formats.tiles(matrix)
    return laid_out.mT.contiguous().view(laid_out.shape)


def untransposed(weight: torch.Tensor) -> torch.Tensor:
    """The right shape over rows that were never turned."""
    return weight.clone(memory_format=torch.contiguous_format).view(weight.shape[::-1])


def transposed_bf16(name: str, raw: dict[str, torch.Tensor]) -> weights.Made:
    return weights.Made(layouts.transposed(raw[name]).view(raw[name].shape), {})


def packed_inputs(stored: torch.Tensor) -> torch.Tensor:
    """The canonical bytes, which hold two inputs each."""
    rows, columns = stored.shape
    return layouts.transposed(stored.view(torch.int8)).view(2 * columns, rows // 2)


def halves_exchanged(rows: torch.Tensor) -> torch.Tensor:
    return operators.swiglu(rows.roll(rows.shape[1] // 2, dims=1))


#: What is wrong -> the schemes that it touches, and how it gets there.
FAULTS: dict[str, tuple[tuple[QuantScheme, ...], Patch]] = {
    "int8 weights are not transposed": ((W8A8_INT8,), replaced(weights, "transposed", untransposed)),
    "bf16 weights are transposed": ((BF16,), replaced(weights, "_bf16", transposed_bf16)),
    "int4 weights are packed along their inputs": (
        _INT4,
        replaced(weights, "int4_columns", packed_inputs),
    ),
    "int4 outputs are packed odd first": (_INT4, replaced(layouts, "pack_int4", packed(1, 0))),
    "a negative low nibble fills the high one": (
        _INT4,
        replaced(layouts, "pack_int4", packed(0, 1, keep_sign=True)),
    ),
    "canonical nibbles are read high first": (
        _INT4,
        replaced(layouts, "unpack_int4", swapped_nibbles),
    ),
    "nibbles lose their sign": (_INT4, replaced(layouts, "unpack_int4", without_sign)),
    "scales are converted to int64": (
        _INT4,
        replaced(weights, "scale_bits", lambda scale: (scale * 2**20).to(torch.int64)),
    ),
    "scale bits are in the upper half": (
        _INT4,
        replaced(weights, "scale_bits", lambda scale: layouts.scale_bits(scale) << 32),
    ),
    "scale bits are read as bf16": (
        _INT4,
        replaced(weights, "scale_bits", lambda scale: layouts.scale_bits(scale) >> 16),
    ),
    "the eights of split tokens are not given back": (
        (W4A8_INT8,),
        replaced(weights, "scale_bias", lambda packed, scale: torch.zeros_like(scale)),
    ),
    "the eights of split tokens are given back twice": (
        (W4A8_INT8,),
        replaced(weights, "scale_bias", lambda packed, scale: 2 * layouts.scale_bias(packed, scale)),
    ),
    "tiles follow their rows": (
        _ALL,
        replaced(kernels, "tiles", rows_before_columns),
    ),
    "tiles are stored by columns": (
        _ALL,
        replaced(kernels, "tiles", transposed_tiles),
    ),
    "plain memory is taken for tiles": (
        _ALL,
        replaced(weights, "to_nz", lambda matrix: matrix),
    ),
    "the gate is the second half": ((BF16, W4A4_INT4), replaced(experts, "swiglu", halves_exchanged)),
}


@pytest.mark.parametrize("scheme", _ALL, ids=str)
def test_without_a_fault_the_numbers_are_right(scheme: QuantScheme) -> None:
    error, limit = error_and_limit(scheme)
    assert error < limit


CASES = [(fault, scheme) for fault, (schemes, _) in FAULTS.items() for scheme in schemes]


@pytest.mark.parametrize(("fault", "scheme"), CASES, ids=[f"{fault}, {scheme}" for fault, scheme in CASES])
def test_a_planted_fault_gives_wrong_numbers(fault: str, scheme: QuantScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault][1](monkeypatch)
    error, limit = error_and_limit(scheme)
    assert not error < 4 * limit, f"{fault}: error {error:.2g} does not stand out from rounding, {limit:.2g}"
