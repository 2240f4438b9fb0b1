"""Layouts bit for bit, by their definitions in index arithmetic that shares nothing with the functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from moe_plugin_flashinfer.layouts import (
    interleave,
    mma_view,
    swap_halves,
    swizzle,
    wrapper_rows,
)

from moe_core.errors import WeightsError
from moe_core.testing.memory import PoisonedMemory

_QUICK = settings(max_examples=30, deadline=None, derandomize=True)
_SIZES = st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(1, 23))


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def random_scales(*shape: int, seed: int = 0) -> torch.Tensor:
    """Any bytes, NaN among them: whoever moves them does not look at them."""
    return random_bytes(*shape, seed=seed).view(torch.float8_e4m3fn)


def by_the_formula(scales: torch.Tensor) -> torch.Tensor:
    """The bytes of one expert's swizzled scales, placed one by one."""
    rows, columns = scales.shape
    rows_padded, columns_padded = -(-rows // 128) * 128, -(-columns // 4) * 4
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    place = ((row // 128) * (columns_padded // 4) + column // 4) * 512
    place = place + (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4
    found = torch.zeros(rows_padded * columns_padded, dtype=torch.uint8)
    found[place.flatten()] = scales.contiguous().view(torch.uint8).flatten()
    return found


def lies_by_the_formula(swizzled: torch.Tensor, scales: torch.Tensor) -> bool:
    return all(
        torch.equal(mine.contiguous().view(torch.uint8).flatten(), by_the_formula(theirs))
        for mine, theirs in zip(swizzled, scales, strict=True)
    )


@_QUICK
@example((1, 128, 4))
@example((2, 129, 5))
@given(_SIZES)
def test_swizzled_bytes_lie_by_the_formula(sizes: tuple[int, int, int]) -> None:
    scales = random_scales(*sizes)
    with PoisonedMemory():
        swizzled = swizzle(scales)
    assert swizzled.dtype == scales.dtype
    assert swizzled.shape == (sizes[0], -(-sizes[1] // 128) * 128, -(-sizes[2] // 4) * 4)
    assert lies_by_the_formula(swizzled, scales)


def in_another_order(*axes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A swizzle whose tiles are ordered wrongly."""

    def wrong(scales: torch.Tensor) -> torch.Tensor:
        count, rows, columns = scales.shape
        parts = scales.view(torch.uint8).view(count, rows // 128, 4, 32, columns // 4, 4)
        return parts.permute(0, *axes).contiguous().view(scales.shape)

    return wrong


@pytest.mark.parametrize(
    ("planted", "is_right"),
    [
        pytest.param(in_another_order(1, 4, 3, 2, 5), True, id="as it is defined"),
        pytest.param(lambda scales: scales, False, id="not at all"),
        pytest.param(in_another_order(4, 1, 3, 2, 5), False, id="tiles column by column"),
        pytest.param(in_another_order(1, 4, 2, 3, 5), False, id="rows of a tile in their order"),
        pytest.param(in_another_order(1, 4, 3, 5, 2), False, id="columns before rows in 16 bytes"),
        pytest.param(in_another_order(1, 3, 2, 4, 5), False, id="tiles taken for rows"),
        pytest.param(lambda scales: swizzle(swizzle(scales)), False, id="twice"),
        pytest.param(lambda scales: swizzle(scales.roll(1, 1)), False, id="rows shifted by one"),
    ],
)
def test_other_orders_do_not_lie_by_the_formula(planted: Callable[..., torch.Tensor], is_right: bool) -> None:
    scales = random_scales(2, 256, 8)
    assert lies_by_the_formula(planted(scales), scales) is is_right


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_scales_of_any_strides_and_addresses(shift: int) -> None:
    wide = random_bytes(2 * 130 * 12 + shift)[shift:].view(torch.float8_e4m3fn)
    for scales in (
        wide.view(2, 130, 12),
        wide.view(2, 12, 130).mT,
        wide.view(2, 130, 12)[:, ::2, ::3],
        wide.view(130, 2, 12).transpose(0, 1),
    ):
        assert lies_by_the_formula(swizzle(scales), scales)


def test_a_place_is_filled_altogether() -> None:
    scales, memory = random_scales(2, 130, 5), torch.full((4, 256, 8), 255, dtype=torch.uint8)
    places = memory.view(torch.float8_e4m3fn)
    filled = swizzle(scales, out=places[1:3])
    assert filled.data_ptr() == places[1].data_ptr()
    assert lies_by_the_formula(places[1:3], scales)
    assert (memory[[0, 3]] == 255).all()


def test_the_mma_view_by_its_definition() -> None:
    scales = random_scales(3, 256, 12)
    swizzled = swizzle(scales)
    view = mma_view(swizzled)
    assert view.shape == (32, 4, 2, 4, 3, 3)
    assert view.data_ptr() == swizzled.data_ptr()
    # Axes: row in a quarter of a tile, quarter, tile of rows, column in a tile, tile of columns, expert.
    line, quarter, row_tile, column, column_tile, expert = torch.meshgrid(
        *[torch.arange(size) for size in view.shape], indexing="ij"
    )
    row = row_tile * 128 + quarter * 32 + line
    expected = scales.view(torch.uint8)[expert, row, column_tile * 4 + column]
    assert torch.equal(view.view(torch.uint8), expected)


@_QUICK
@given(st.integers(1, 3), st.integers(1, 5), st.sampled_from([(), (1,), (7,), (4, 3)]))
def test_turns_by_their_definition(count: int, turns: int, rest: tuple[int, ...]) -> None:
    half = 64 * turns
    halves = random_bytes(count, 2 * half, *rest)
    turned = interleave(halves)
    assert turned.shape == halves.shape
    for row in range(2 * half):
        turn, inside = divmod(row, 128)
        source = turn * 64 + inside if inside < 64 else half + turn * 64 + inside - 64
        assert torch.equal(turned[:, row], halves[:, source])
    swapped = swap_halves(halves)
    assert torch.equal(swapped[:, :half], halves[:, half:])
    assert torch.equal(swapped[:, half:], halves[:, :half])
    assert torch.equal(swap_halves(swapped), halves)


def test_turning_twice_is_not_turning_back() -> None:
    halves = random_bytes(1, 384, 2)
    assert not torch.equal(interleave(interleave(halves)), halves)


def test_rows_of_the_wrapper() -> None:
    rows = wrapper_rows(256).tolist()
    assert rows == [*range(128, 192), *range(64), *range(192, 256), *range(64, 128)]
    # Codes and their block scales, of other widths and dtypes, come into one order.
    for halves in (random_bytes(2, 256, 64), random_bytes(2, 256, 8)):
        assert torch.equal(interleave(swap_halves(halves)), halves[:, rows])


@pytest.mark.error_path
def test_halves_that_fill_no_turns_are_refused() -> None:
    with pytest.raises(WeightsError, match="turns of 64: halves of 96 rows"):
        interleave(random_bytes(1, 192, 2))
