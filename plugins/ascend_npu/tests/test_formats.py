"""The emulated memory: every element where the documentation puts it, and views read through it."""

from __future__ import annotations

import pytest
import torch
from moe_plugin_ascend.emulation.formats import (
    NZ,
    annotate,
    fits_tiles,
    int4_values,
    int4_words,
    note_of,
    tiles,
    untiled,
    values,
)

pytestmark = pytest.mark.usefixtures("emulation")


def cast(matrix: torch.Tensor) -> torch.Tensor:
    return torch.ops.npu.npu_format_cast(matrix, NZ)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 16), (torch.int8, 32), (torch.int32, 8)])
def test_each_element_lies_where_the_format_says(dtype: torch.dtype, width: int) -> None:
    rows, columns = 48, 3 * width
    matrix = torch.randint(-99, 99, (rows, columns)).to(dtype)
    memory = cast(matrix).untyped_storage()
    flat = torch.empty(0, dtype=dtype).set_(memory)
    for row, column in [(0, 0), (0, width), (15, 1), (16, 0), (47, columns - 1), (17, 2 * width + 3)]:
        place = ((column // width * (rows // 16) + row // 16) * 16 + row % 16) * width + column % width
        assert flat[place] == matrix[row, column]


def test_tiles_and_back_is_the_same_and_not_nothing() -> None:
    matrices = torch.randn(3, 32, 64)
    laid_out = tiles(matrices)
    assert torch.equal(untiled(laid_out.reshape(-1), (3, 32, 64)), matrices)
    assert not torch.equal(laid_out.reshape(matrices.shape), matrices)


def test_views_of_tiles_are_read_through_their_storage() -> None:
    matrices = torch.randint(-128, 128, (2, 32, 64), dtype=torch.int8)
    laid_out = cast(matrices)
    assert not torch.equal(laid_out, matrices)
    assert torch.equal(values(laid_out), matrices)
    assert torch.equal(values(laid_out.mT), matrices.mT)
    assert torch.equal(values(laid_out[1]), matrices[1])
    assert torch.equal(values(laid_out.view(torch.int32)), matrices.view(torch.int32))
    assert note_of(torch.nn.Parameter(laid_out, requires_grad=False).data) == note_of(laid_out)


def test_an_expert_copied_into_tiles_is_that_expert() -> None:
    matrices = torch.randn(3, 16, 32).to(torch.bfloat16)
    place = torch.ops.npu.empty_with_format(
        [3, 16, 32], dtype=torch.bfloat16, device=torch.device("cpu"), acl_format=NZ
    )
    for expert in (2, 0, 1):
        place[expert].copy_(cast(matrices[expert].clone()))
    assert torch.equal(values(place), matrices)


def test_what_is_no_whole_tile_is_not_cast() -> None:
    assert fits_tiles((16, 32), torch.int8)
    for shape in ((15, 32), (16, 31)):
        assert not fits_tiles(shape, torch.int8)
        with pytest.raises(RuntimeError, match="whole tiles"):
            cast(torch.zeros(shape, dtype=torch.int8))
    with pytest.raises(RuntimeError, match="whole storage"):
        cast(torch.zeros(2, 16, 32, dtype=torch.int8)[1])


def test_int4_words_hold_eight_signed_values_lowest_first() -> None:
    codes = torch.tensor([[-8, -1, 0, 1, 7, -2, 3, -5]], dtype=torch.int8)
    word = int4_words(codes)
    expected = sum((int(code) & 15) << (4 * place) for place, code in enumerate(codes[0]))
    assert int(word) & 0xFFFFFFFF == expected
    assert torch.equal(int4_values(word), codes)
    many = torch.randint(-8, 8, (5, 64), dtype=torch.int8)
    assert torch.equal(int4_values(int4_words(many)), many)


def test_a_note_stays_with_its_storage() -> None:
    laid_out = cast(torch.zeros(16, 32, dtype=torch.int8))
    note = note_of(laid_out)
    assert note is not None
    assert note_of(laid_out.clone()) is None
    assert note_of(annotate(laid_out.clone(), note)) is note
