"""Checked ids in one launch, against torch."""

from __future__ import annotations

import pytest
import torch
from triton_layers import DEVICE

from moe_core.kernels.checks import checked_ids

pytest.importorskip("triton", reason="needs triton")
from moe_core.kernels.triton import ids as triton_ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [(1, 8), (7, 3), (100, 10), (0, 4)], ids=str)
@pytest.mark.parametrize("with_table", [False, True])
def test_ids_are_those_of_torch(size: tuple[int, int], dtype: torch.dtype, with_table: bool) -> None:
    generator = torch.Generator().manual_seed(size[0])
    # A view with strides of its own.
    ids = torch.randint(-1, 9, (size[1], 2 * size[0]), dtype=dtype, generator=generator)[:, ::2].T
    table = torch.randperm(9, generator=generator) if with_table else None
    got = triton_ids.checked_ids(ids.to(DEVICE), 9, None if table is None else table.to(DEVICE))
    assert got.dtype == torch.int64
    assert got.is_contiguous()
    assert torch.equal(got.cpu(), checked_ids(ids, 9, table))


def test_ids_that_are_as_wanted_are_not_copied() -> None:
    ids = torch.tensor([[0, 8], [-1, 3]], device=DEVICE)
    assert triton_ids.checked_ids(ids, 9) is ids


def test_one_token_may_have_any_stride() -> None:
    # Contiguous, as one row is, wherever the next one would be.
    ids = torch.arange(40, dtype=torch.int32, device=DEVICE).view(2, 20)[1:, 3:11]
    assert triton_ids.checked_ids(ids, 40).tolist() == [list(range(23, 31))]
