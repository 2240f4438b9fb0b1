"""What preparation makes of numbers, unpacked again by code that shares nothing with it."""

from __future__ import annotations

import struct

import pytest
import torch
from moe_plugin_ascend.layouts import int4_columns, pack_int4, scale_bias, scale_bits, transposed, unpack_int4

from moe_core.errors import WeightsError


def canonical_int4(rows: int, columns: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Random values, packed one by one: two inputs in a byte, the first in the low nibble."""
    codes = torch.randint(-8, 8, (rows, columns)).tolist()
    packed = [[(row[2 * i] & 15) | ((row[2 * i + 1] & 15) << 4) for i in range(columns // 2)] for row in codes]
    return torch.tensor(packed, dtype=torch.uint8), codes


def test_canonical_int4_is_unpacked_with_its_sign() -> None:
    packed, codes = canonical_int4(6, 10)
    assert unpack_int4(packed).tolist() == codes
    assert unpack_int4(packed.mT.contiguous().mT).tolist() == codes


def test_int4_columns_pair_outputs_the_even_one_in_the_low_nibble() -> None:
    # More outputs than are repacked at a time, and not a multiple of them.
    packed, codes = canonical_int4(520, 6)
    columns = int4_columns(packed)
    assert columns.shape == (6, 260)
    assert columns.dtype == torch.int8
    for inputs in range(6):
        for pair in range(260):
            byte = int(columns[inputs, pair]) & 255
            assert byte & 15 == codes[2 * pair][inputs] & 15
            assert byte >> 4 == codes[2 * pair + 1][inputs] & 15


@pytest.mark.error_path
@pytest.mark.parametrize("width", [7, 12])
def test_int4_outputs_that_fill_no_words_are_refused(width: int) -> None:
    assert pack_int4(torch.zeros(2, 8, dtype=torch.int8)).shape == (2, 4)
    with pytest.raises(WeightsError, match=f"words of 8: {width} outputs"):
        pack_int4(torch.zeros(2, width, dtype=torch.int8))


def test_scales_become_their_bits_below_zeros() -> None:
    scales = [0.0123, 1.0, 3.4e38, 1e-40, 0.0, -2.5]
    for scale, bits in zip(scales, scale_bits(torch.tensor(scales)).tolist(), strict=True):
        single = struct.pack("<f", scale)
        assert struct.pack("<q", bits) == single + bytes(4)


def test_the_bias_of_split_tokens_is_eight_times_the_scaled_column_sum() -> None:
    (packed, codes), scale = canonical_int4(5, 30), torch.rand(5)
    expected = [8 * sum(row) * float(scale[i]) for i, row in enumerate(codes)]
    assert scale_bias(packed, scale).tolist() == pytest.approx(expected, rel=1e-6)


def test_transposed_memory_is_new_and_contiguous() -> None:
    weight = torch.randint(-128, 128, (3, 4, 5), dtype=torch.int8)
    result = transposed(weight[1])
    assert torch.equal(result, weight[1].T)
    assert result.is_contiguous()
    square = torch.zeros(1, 4, dtype=torch.int8)
    assert transposed(square).data_ptr() != square.data_ptr()
