"""The emulated number format and memory, against definitions written out in float64 and loops."""

from __future__ import annotations

import pytest
import torch
from moe_plugin_flashinfer.emulation import nvfp4
from moe_plugin_flashinfer.emulation.memory import UndefinedBehaviour, at_address, swizzled_places, unswizzled
from nvfp4_by_hand import E2M1, E4M3, in_tiles, nearest, place, rounded

from moe_core.testing.memory import same_bits


def test_every_byte_and_scale_means_what_the_format_says() -> None:
    numbers = nvfp4.values(torch.arange(256, dtype=torch.uint8).view(32, 8), torch.ones(32, 1).to(torch.float8_e4m3fn))
    signed = torch.cat((E2M1, -E2M1))
    for byte, pair in enumerate(numbers.view(256, 2).tolist()):
        assert pair == [signed[byte % 16], signed[byte // 16]]
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    elements = torch.full((127, 8), 0x22, dtype=torch.uint8)
    assert torch.equal(nvfp4.values(elements, scales)[:, 0].double(), E4M3)


def test_elements_round_to_the_nearest_and_ties_to_even() -> None:
    middles = (E2M1[:-1] + E2M1[1:]) / 2
    beside = [torch.nextafter(middles, torch.full_like(middles, limit)) for limit in (0.0, 9.0)]
    numbers = torch.cat((E2M1, middles, *beside, torch.rand(1000, dtype=torch.float64) * 7, torch.tensor([1e9])))
    assert torch.equal(nvfp4.to_e2m1(numbers).long(), nearest(numbers, E2M1))
    assert torch.equal(nvfp4.to_e2m1(-numbers).long(), nearest(numbers, E2M1) + 8)
    assert nvfp4.to_e2m1(torch.tensor([5.0, 2.5, 3.5, 0.25, 0.75], dtype=torch.float64)).tolist() == [6, 4, 6, 0, 2]
    assert nvfp4.to_e2m1(torch.tensor([torch.inf, -torch.inf, torch.nan]).double()).tolist() == [7, 15, 7]


def test_scales_round_to_the_nearest_and_saturate() -> None:
    middles = (E4M3[:-1] + E4M3[1:]) / 2
    beside = [torch.nextafter(middles, torch.full_like(middles, limit)) for limit in (0.0, 999.0)]
    numbers = torch.cat(
        (E4M3, middles, *beside, torch.rand(1000, dtype=torch.float64) * 2, torch.tensor([464.5, 1e30]))
    )
    assert torch.equal(nvfp4.to_e4m3(numbers).view(torch.uint8).long(), nearest(numbers, E4M3))


@pytest.mark.parametrize("global_scale", [1.0, 37.25, 2688 / 0.03, 1e-4])
def test_rows_round_as_by_hand(global_scale: float) -> None:
    numbers = torch.randn(64, 256).bfloat16() * torch.logspace(-3, 3, 64)[:, None]
    numbers[3], numbers[4, :16], numbers[5, 7] = 0.0, 0.0, -0.0
    packed, scales = nvfp4.quantize(numbers, torch.tensor([global_scale]))
    by_hand = rounded(numbers, torch.tensor(global_scale).double().item())
    assert torch.equal(scales.view(torch.uint8), by_hand.scales.view(torch.uint8))
    # Where a scale has become zero codes are of no importance.
    counts = (by_hand.scale_codes > 0).repeat_interleave(8, dim=1)
    assert torch.equal(packed[counts], by_hand.packed[counts])


def test_elements_in_the_middle_of_a_block_go_to_the_even_code() -> None:
    block = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0])
    packed, scales = nvfp4.quantize(block[None] / 8, torch.tensor([8.0]))
    assert scales.float().item() == 1
    assert nvfp4.values(packed, scales)[0].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0]


def test_a_scale_that_rounds_to_zero_makes_a_block_of_zeros() -> None:
    numbers = torch.full((1, 32), 1e-3)
    numbers[0, 16:] = 1.0
    packed, scales = nvfp4.quantize(numbers, torch.tensor([1.0]))
    assert scales.float().tolist()[0][0] == 0
    assert (packed[0, :8] == 0x77).all()
    assert (nvfp4.values(packed, scales)[0, :16] == 0).all()


def test_scales_saturate_and_elements_with_them() -> None:
    packed, scales = nvfp4.quantize(torch.full((1, 16), 1e4), torch.tensor([1.0]))
    assert scales.float().item() == 448
    assert (nvfp4.values(packed, scales) == 6 * 448).all()


def test_nan_is_the_largest_code_beside_numbers_and_nan_alone() -> None:
    numbers = torch.ones(2, 16)
    numbers[0, 5], numbers[1] = torch.nan, torch.nan
    packed, scales = nvfp4.quantize(numbers, torch.tensor([1.0]))
    read = nvfp4.values(packed, scales)
    assert read[0].isfinite().all()
    assert read[0, 5] == 6 * scales[0].float()
    assert read[1].isnan().all()


def test_rows_have_a_global_scale_each() -> None:
    numbers = torch.randn(2, 32)
    both = nvfp4.quantize(numbers, torch.tensor([3.0, 90.0]))
    for row, scale in enumerate((3.0, 90.0)):
        alone = nvfp4.quantize(numbers[row : row + 1], torch.tensor([scale]))
        assert all(same_bits(joint[row : row + 1], single) for joint, single in zip(both, alone, strict=True))


def test_a_search_takes_the_nearer_grid() -> None:
    # At 6 the largest is exact and the others miss; at 4 all are.
    block = torch.tensor([4.0, 3.0, 2.0, 1.0] * 4)[None] * 1.5
    plain = nvfp4.values(*nvfp4.quantize(block, torch.tensor([1.0])))
    searched = nvfp4.values(*nvfp4.quantize_by_search(block, torch.tensor([1.0])))
    assert torch.equal(searched, block)
    assert not torch.equal(plain, block)


@pytest.mark.parametrize(("rows", "channels"), [(128, 64), (256, 192), (5, 16), (200, 272)])
def test_each_block_scale_lies_where_the_layout_says(rows: int, channels: int) -> None:
    width = -(-channels // 16)
    places = swizzled_places(rows, channels)
    assert places.shape == (rows, width)
    for row in range(0, rows, 3):
        for column in range(width):
            assert places[row, column] == place(row, column, width)
    scales = torch.randint(1, 127, (rows, width), dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert same_bits(unswizzled(in_tiles(scales), rows, channels), scales)


def test_an_operand_is_its_address_whatever_its_view_says() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    view = memory[16:].view(4, 12).T
    assert torch.equal(at_address(view, torch.uint8, (2, 6)), memory[16:28].view(2, 6))
    written = at_address(view, torch.int32, (2,))
    written.zero_()
    assert memory[15:25].tolist() == [15, *[0] * 8, 24]


@pytest.mark.error_path
def test_an_operand_is_not_read_past_its_memory_or_from_odd_addresses() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(UndefinedBehaviour, match=r"49 bytes are read .* has 48 left"):
        at_address(memory[16:], torch.uint8, (49,))
    with pytest.raises(UndefinedBehaviour, match="misaligned"):
        at_address(memory[8:], torch.uint8, (16,))
