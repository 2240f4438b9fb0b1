"""What happens to rows outside the GEMMs: activation, quantization, combine."""

from __future__ import annotations

import pytest
import torch
from oracle import activate, relative_error
from triton_layers import DEVICE

from moe_core.activation import GEGLU, RELU2, SWIGLU, SWIGLU_OAI, ActivationSpec
from moe_core.errors import SpecError
from moe_core.kernels.combine import combine as torch_combine
from moe_core.kernels.quantize import quantize_rows_fp8

pytest.importorskip("triton", reason="needs triton")
from moe_core.kernels.triton.activation import activation_constants, apply_activation
from moe_core.kernels.triton.combine import combine
from moe_core.kernels.triton.quantize import quantize_rows
from moe_core.kernels.triton.sort import RowTiles, group_tiles

SPECS = [
    SWIGLU,
    SWIGLU_OAI,
    GEGLU,
    RELU2,
    ActivationSpec(kind="relu", gated=False),
    ActivationSpec(kind="gelu_tanh", row_order="interleaved", limit=1.0, clamp="after"),
]
#: Rows 0, 1 and 6 of nine.
ROWS = [0, 1, 6]


def _tiles() -> RowTiles:
    return group_tiles(torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE), 9, 2)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_activation_follows_its_spec_and_leaves_other_rows_alone(spec: ActivationSpec) -> None:
    hidden = torch.randn(9, 80) * 2
    want = activate(hidden.double(), spec)
    got = apply_activation(hidden.to(DEVICE), spec).cpu()
    # fp32 exponentials of GPUs are good to about 1e-6.
    assert relative_error(got, want) < 2e-6
    some = apply_activation(hidden.to(DEVICE), spec, _tiles()).cpu()
    assert torch.equal(some[ROWS], got[ROWS])
    assert some[[2, 3, 4, 5, 7, 8]].isnan().all()


@pytest.mark.parametrize("kind", ["silu", "relu"])
def test_activation_keeps_nan(kind: str) -> None:
    hidden = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]], device=DEVICE)
    spec = ActivationSpec(kind=kind, limit=2.0)
    assert apply_activation(hidden, spec).isnan().tolist() == [[True, True]]


@pytest.mark.error_path
def test_a_models_own_activation_is_no_kernel() -> None:
    with pytest.raises(SpecError, match="'module' has no kernel"):
        activation_constants(ActivationSpec(kind="module"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_codes_are_those_of_torch(dtype: torch.dtype) -> None:
    rows = (torch.randn(7, 300) * 3).to(dtype)
    rows[2], rows[3, :128] = 0, 0
    codes, scales = (part.cpu() for part in quantize_rows(rows.to(DEVICE), torch.float8_e4m3fn, 128))
    want_codes, want_scales = quantize_rows_fp8(rows)
    assert torch.equal(scales, want_scales)
    assert torch.equal(codes.float(), want_codes.float())


def test_int8_codes_are_rounded_half_to_even() -> None:
    rows = torch.randn(5, 96)
    rows[1] = 0
    rows[2, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    rows[2, 4:] = 0
    codes, scales = (part.cpu() for part in quantize_rows(rows.to(DEVICE), torch.int8, 96))
    want = rows.abs().amax(-1, keepdim=True) / 127
    assert torch.equal(scales, want)
    assert torch.equal(codes.float(), (rows / torch.where(want == 0, 1.0, want)).round())


@pytest.mark.parametrize(("dtype", "group"), [(torch.int8, 40), (torch.float8_e4m3fn, 16)])
@pytest.mark.parametrize("spec", [SWIGLU_OAI, RELU2], ids=str)
def test_activation_and_quantization_are_one_rounding(spec: ActivationSpec, dtype: torch.dtype, group: int) -> None:
    hidden = torch.randn(9, 40 * spec.rows_per_channel)
    codes, scales = quantize_rows(hidden.to(DEVICE), dtype, group, activation=spec, tiles=_tiles())
    want = activate(hidden.double(), spec)[ROWS]
    factors = scales.cpu()[ROWS].double().repeat_interleave(group, 1)[:, :40]
    # Half a step: of the scale for integers, of the value (or of the smallest step) for three fraction bits.
    step = factors if dtype == torch.int8 else torch.maximum(want.abs() / 8, factors / 512)
    assert ((codes.cpu()[ROWS].double() * factors - want).abs() <= 0.501 * step).all()


@pytest.mark.parametrize("weighted", [True, False])
def test_combine_gives_the_bits_of_torch(weighted: bool) -> None:
    rows, weights = torch.randn(12, 70).bfloat16(), torch.rand(5, 3)
    row_map = torch.randperm(12)[:10]
    row_map = torch.cat([row_map, torch.full((5,), -1)])[torch.randperm(15)].view(5, 3)
    row_map[4] = -1
    weights[row_map < 0] = torch.nan
    unused = sorted(set(range(12)) - set(row_map.flatten().tolist()))
    rows[unused] = torch.nan
    factors = weights if weighted else None
    got = combine(rows.to(DEVICE), row_map.to(DEVICE), weights.to(DEVICE) if weighted else None, torch.bfloat16)
    assert torch.equal(got.cpu(), torch_combine(rows, row_map, factors, torch.bfloat16))
    assert (got[4] == 0).all()
