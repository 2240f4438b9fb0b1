"""The emulated functions on masked blocks of rows, one by one, on operands that were laid out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_plugin_flashinfer.emulation import emulated, find
from moe_plugin_flashinfer.emulation.memory import UndefinedBehaviour
from nvfp4_by_hand import Rounded, bf16, in_tiles, mma_view, place, rounded, silu

from moe_core.testing.memory import same_bits

EXPERTS, ROWS, CHANNELS = 3, 40, 128
COUNTS = torch.tensor([0, 40, 7], dtype=torch.int32)
SCALES = torch.tensor([100.0, 31.5, 400.0])
FORMATS: dict[str, Any] = {
    "ab_dtype": "float4_e2m1fn",
    "sf_dtype": "float8_e4m3fn",
    "c_dtype": "bfloat16",
    "sf_vec_size": 16,
}


def poisoned(rows: torch.Tensor) -> torch.Tensor:
    """NaN from each expert's count on."""
    is_real = torch.arange(rows.shape[1]) < COUNTS[:, None]
    return torch.where(is_real[..., None], rows, torch.nan)


def check_rounded(found: tuple[torch.Tensor, torch.Tensor], wanted: list[Rounded], same: float) -> None:
    """Both results lie as documented, hold what was rounded by hand, and are poison elsewhere."""
    packed, scales = found
    width = wanted[0].codes.shape[1]
    assert packed.shape == (ROWS, width // 2, EXPERTS)
    assert packed.permute(2, 0, 1).is_contiguous()
    assert scales.shape == (32, 4, 1, 4, width // 64, EXPERTS)
    assert scales.dtype == torch.float8_e4m3fn
    tiles = scales.permute(5, 2, 4, 0, 1, 3)
    assert tiles.is_contiguous()
    by_byte = tiles.reshape(EXPERTS, -1).view(torch.uint8)
    for expert, rows in enumerate(wanted):
        count = int(COUNTS[expert])
        assert (packed[:count, :, expert] == rows.packed[:count]).float().mean().nan_to_num(1.0) >= same
        for row in range(ROWS):
            stored = by_byte[expert, [place(row, column, width // 16) for column in range(width // 16)]]
            if row < count:
                assert (stored == rows.scales[row].view(torch.uint8)).float().mean() >= same
            else:
                assert (stored & 0x7F == 0x7F).all()
        assert (packed[count:, :, expert] == 127).all()


def test_blocks_of_rows_are_rounded_as_by_hand_and_no_further_row_is_touched() -> None:
    rows = torch.randn(EXPERTS, ROWS, CHANNELS).bfloat16()
    found = find("scaled_fp4_grouped_quantize")(poisoned(rows), COUNTS, SCALES)
    check_rounded(found, [rounded(r, float(s)) for r, s in zip(rows, SCALES, strict=True)], same=1.0)


def test_swiglu_takes_the_first_half_as_gate_and_rounds_to_bf16_before_nvfp4() -> None:
    rows = torch.randn(EXPERTS, ROWS, 2 * CHANNELS).bfloat16()
    found = find("silu_and_mul_scaled_nvfp4_experts_quantize")(poisoned(rows), COUNTS, SCALES)
    gate, up = rows.double().chunk(2, dim=-1)
    # fp32 and float64 fall on two sides of a bf16 tie in one of some ten thousand elements.
    by_hand = [rounded(r, float(s)) for r, s in zip(bf16(silu(gate) * up), SCALES, strict=True)]
    check_rounded(found, by_hand, same=0.998)
    unrounded = [rounded(r, float(s)) for r, s in zip(silu(gate) * up, SCALES, strict=True)]
    with pytest.raises(AssertionError):
        check_rounded(found, unrounded, same=0.998)


class Operands:
    """Both operands of a GEMM, rounded by hand, and where the output goes."""

    def __init__(self, outputs: int = 72) -> None:
        self.rows = [rounded(torch.randn(ROWS, CHANNELS), float(scale)) for scale in SCALES]
        self.weights = [rounded(torch.randn(outputs, CHANNELS), 500.0) for _ in range(EXPERTS)]
        self.alpha = 1 / (SCALES * 500.0) * torch.tensor([1.0, 2.0, 0.5])
        self.out = torch.full((EXPERTS, ROWS, outputs), torch.nan, dtype=torch.bfloat16)

    @staticmethod
    def pair(operand: list[Rounded]) -> tuple[torch.Tensor, torch.Tensor]:
        packed = torch.stack([each.packed for each in operand])
        return packed.permute(1, 2, 0), mma_view([in_tiles(each.scales) for each in operand])

    def __call__(self, **changes: Any) -> torch.Tensor:
        arguments = {
            "lhs": self.pair(self.rows),
            "rhs": self.pair(self.weights),
            "out": self.out.permute(1, 2, 0),
            "masked_m": COUNTS,
            "alpha": self.alpha,
            "alpha_dtype": "float32",
            **FORMATS,
        }
        find("gemm.grouped_gemm_nt_masked")(**arguments | changes)
        return self.out

    def check(self) -> None:
        """Against float64: what is left is one rounding to bf16, and the order of fp32 sums."""
        for expert, (rows, weight) in enumerate(zip(self.rows, self.weights, strict=True)):
            count = int(COUNTS[expert])
            wanted = rows.raw @ weight.raw.T * float(self.alpha[expert])
            error = (self.out[expert].double() - wanted)[:count].abs()
            assert (error <= wanted[:count].abs() * 2.0**-8 + 1e-4).all()
            assert self.out[expert, count:].isnan().all(), "rows past the count are not written"


def test_products_are_those_of_the_numbers_and_alphas() -> None:
    operands = Operands()
    operands()
    operands.check()


def test_scales_may_be_bytes_of_tiles_and_alpha_may_have_more_axes() -> None:
    operands = Operands()
    packed, _ = operands.pair(operands.weights)
    tiles = torch.stack([in_tiles(each.scales).view(torch.uint8) for each in operands.weights])
    operands(rhs=(packed, tiles.view(torch.float8_e4m3fn)), alpha=operands.alpha.view(1, 1, -1))
    operands.check()


def test_without_alpha_sums_stay_as_they_are() -> None:
    operands = Operands()
    operands(alpha=None, alpha_dtype=None)
    operands.alpha = torch.ones(EXPERTS)
    operands.check()


def test_undefined_rows_of_the_operands_are_not_read() -> None:
    operands = Operands()
    packed, scales = operands.pair(operands.rows)
    is_real = (torch.arange(128) < COUNTS[:, None]).view(EXPERTS, 4, 32)
    bad = torch.where(is_real.permute(2, 1, 0)[:, :, None, None, None], scales.view(torch.uint8), 0x7F)
    stored = bad.permute(5, 2, 4, 0, 1, 3).contiguous()
    operands(lhs=(packed, stored.permute(3, 4, 1, 5, 2, 0).view(torch.float8_e4m3fn)))
    operands.check()


def test_strides_are_not_asked() -> None:
    # A contiguous copy of the view has the same shape and numbers, and its memory in another order.
    operands = Operands()
    packed, scales = operands.pair(operands.weights)
    operands(rhs=(packed, scales.contiguous()))
    with pytest.raises(AssertionError):
        operands.check()


def test_signals_are_counted_up_for_each_multiprocessor() -> None:
    operands, signals = Operands(), torch.zeros(EXPERTS, dtype=torch.int32)
    operands(dst_signals=signals, sm_count=5)
    assert signals.tolist() == [5, 5, 5]


@pytest.mark.error_path
def test_the_gemm_refuses_what_the_library_refuses() -> None:
    operands = Operands()
    with pytest.raises(TypeError, match="missing a required"):
        find("gemm.grouped_gemm_nt_masked")(operands.pair(operands.rows))
    for wrong in (
        {"ab_dtype": "float8_e4m3fn"},
        {"sf_vec_size": 32},
        {"alpha_dtype": None},
        {"mma_tiler_mn": (64, 128)},
        {"cluster_shape_mn": (8, 1)},
    ):
        with pytest.raises(TypeError):
            operands(**wrong)
    with pytest.raises(NotImplementedError, match="epilogue is not emulated"):
        operands(epilogue="identity")
    with pytest.raises(UndefinedBehaviour):
        operands(masked_m=COUNTS[:2].clone())
    with pytest.raises(UndefinedBehaviour):
        operands(alpha=operands.alpha.bfloat16())


@pytest.mark.error_path
def test_quantizers_refuse_what_the_library_refuses() -> None:
    quantize = find("scaled_fp4_grouped_quantize")
    rows = torch.randn(EXPERTS, ROWS, CHANNELS).bfloat16()
    with pytest.raises(AssertionError, match="multiple of 16"):
        quantize(rows[..., :24].contiguous(), COUNTS, SCALES)
    for wrong in (
        (rows[:, :20], COUNTS, SCALES),
        (rows, COUNTS.long(), SCALES),
        (rows, COUNTS, SCALES.double()),
        (rows, COUNTS, SCALES[:1]),
        (rows, COUNTS, SCALES[:, None]),
    ):
        with pytest.raises(RuntimeError, match="Check failed"):
            quantize(*wrong)
    with pytest.raises(NotImplementedError):
        quantize(rows.float(), COUNTS, SCALES)


def test_a_plain_matrix_is_rounded_with_linear_or_tiled_scales() -> None:
    rows = torch.randn(37, 192).bfloat16()
    by_hand = rounded(rows, 250.0)
    scale = torch.tensor([250.0])
    packed, linear = find("fp4_quantize")(rows, scale, is_sf_swizzled_layout=False)
    assert torch.equal(packed, by_hand.packed)
    assert torch.equal(linear, by_hand.scales.view(torch.uint8))
    packed, tiles = find("nvfp4_quantize")(rows, scale)
    assert torch.equal(packed, by_hand.packed)
    assert same_bits(tiles, in_tiles(by_hand.scales).view(torch.uint8))


@pytest.mark.error_path
def test_the_later_release_searches_for_scales_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(EXPERTS, ROWS, CHANNELS).bfloat16()
    with emulated("0.6.11.post3"):
        plain, _ = find("scaled_fp4_grouped_quantize")(rows, COUNTS, SCALES)
        monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
        assert torch.equal(find("scaled_fp4_grouped_quantize")(rows, COUNTS, SCALES)[0], plain)
    quantize = find("scaled_fp4_grouped_quantize")
    assert torch.equal(quantize(rows, COUNTS, SCALES, nvfp4_4over6=None)[0], plain)
    with pytest.warns(FutureWarning, match="nvfp4_4over6"):
        searched, _ = quantize(rows, COUNTS, SCALES)
    assert not torch.equal(searched, plain)
    with pytest.raises(TypeError, match="must be an NVFP44Over6Config or None"):
        quantize(rows, COUNTS, SCALES, nvfp4_4over6=False)
    monkeypatch.delenv("FLASHINFER_NVFP4_4OVER6")
    assert torch.equal(quantize(rows, COUNTS, SCALES)[0], plain)
