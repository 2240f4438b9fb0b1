"""Codes in bytes of their own, packed and unpacked."""

from __future__ import annotations

import pytest
import torch

from moe_core.weights.codes import pack, unpack


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_two_codes_to_a_byte(dtype: torch.dtype, axis: int) -> None:
    low = 0 if dtype == torch.uint8 else -8
    codes = torch.randint(low, low + 16, (6, 10), generator=torch.Generator().manual_seed(5), dtype=dtype)
    packed = pack(codes, axis)
    assert packed.dtype == dtype
    assert packed.is_contiguous()
    along, halved = codes.movedim(axis, 0), packed.view(torch.uint8).movedim(axis, 0)
    for pair, byte in enumerate(halved):
        # Negative codes are two's complement: their upper bits must not reach the other nibble.
        first, second = (along[2 * pair + place].int() % 16 for place in (0, 1))
        assert torch.equal(byte.int(), first + 16 * second)
    assert torch.equal(unpack(packed, axis % 2, 4), (codes & 15).view(torch.uint8))


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1)])
@pytest.mark.parametrize("axis", [0, 1])
def test_words_along_an_axis_of_one(shape: tuple[int, int], axis: int) -> None:
    # Any stride stands for an axis of length one, and slices of files come with such.
    words = torch.full((2 * shape[0], 2 * shape[1]), 0x76543210, dtype=torch.int32)[::2, ::2]
    codes = unpack(words, axis, 4)
    assert torch.equal(codes.movedim(axis, 0)[:8, 0], torch.arange(8, dtype=torch.uint8))
