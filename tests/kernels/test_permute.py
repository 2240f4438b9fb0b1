"""Rows, counts and copies against a plain loop over slots."""

from __future__ import annotations

import pytest
import torch

from moe_core.kernels.combine import combine
from moe_core.kernels.permute import gather_masked, gather_row_values, gather_rows, masked_row_map, max_rows, permute
from moe_core.payloads import Tensor


def _ids(tokens: int, top_k: int, experts: int) -> Tensor:
    return torch.randint(-1, experts, (tokens, top_k))


@pytest.mark.parametrize("alignment", [1, 4, 128])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 3), (1, 1, 1), (7, 3, 5), (40, 2, 64), (33, 6, 4)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_grouped_in_token_order(
    tokens: int, top_k: int, experts: int, alignment: int, dtype: torch.dtype
) -> None:
    ids = _ids(tokens, top_k, experts).to(dtype)
    permutation = permute(ids, experts, alignment)
    rows, end = {}, 0
    for expert in range(experts):
        slots = [(t, k) for t in range(tokens) for k in range(top_k) if ids[t, k] == expert]
        rows |= {slot: end + i for i, slot in enumerate(slots)}
        assert int(permutation.num_tokens_per_expert[expert]) == len(slots)
        end += -(-len(slots) // alignment) * alignment
        assert int(permutation.group_ends[expert]) == end
    want = [[rows.get((t, k), -1) for k in range(top_k)] for t in range(tokens)]
    assert permutation.row_map.tolist() == want
    assert end <= permutation.num_rows <= max_rows(tokens * top_k, experts, alignment)
    assert permutation.num_tokens_per_expert.dtype == permutation.group_ends.dtype == torch.int32


@pytest.mark.parametrize(("slots", "experts", "alignment"), [(1, 8, 16), (20, 3, 4), (9, 9, 4), (50, 1, 8)])
def test_row_bound_is_reached_by_the_worst_routing(slots: int, experts: int, alignment: int) -> None:
    counts = [1] * min(slots, experts) + [0] * (experts - min(slots, experts))
    counts[0] += slots - sum(counts)
    worst = sum(-(-count // alignment) * alignment for count in counts)
    assert worst <= max_rows(slots, experts, alignment) <= worst + alignment


def test_strided_ids_give_the_same_rows() -> None:
    ids = _ids(9, 4, 6)
    strided = ids.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(permute(ids, 6).row_map, permute(strided, 6).row_map)


@pytest.mark.parametrize(("alignment", "spare"), [(4, 0), (1, 0), (1, -2), (1, 5)])
def test_gathered_rows_and_values_belong_to_their_slots(alignment: int, spare: int) -> None:
    ids, x, values = _ids(12, 3, 5), torch.randn(12, 8), torch.rand(12, 3)
    # As many slots without a row as there may be rows too few.
    ids[:2, 0] = -1
    permutation = permute(ids, 5, alignment)
    permutation.num_rows += spare
    rows, row_values = gather_rows(x, permutation), gather_row_values(values, permutation)
    assert rows.shape == (permutation.num_rows, 8)
    for t, k in (ids >= 0).nonzero().tolist():
        row = int(permutation.row_map[t, k])
        assert torch.equal(rows[row], x[t])
        assert row_values[row] == values[t, k]


def test_masked_blocks_hold_each_experts_rows() -> None:
    ids, x = torch.tensor([[2, 2], [0, -1], [2, 1]]), torch.randn(3, 4)
    row_map, masked_m = masked_row_map(ids, 4, 5)
    assert masked_m.tolist() == [1, 1, 3, 0]
    assert row_map.tolist() == [[10, 11], [0, -1], [12, 5]]
    blocks = gather_masked(x, row_map, 4, 5)
    assert torch.equal(blocks[2, :3], x[[0, 0, 2]])
    assert torch.equal(blocks[1, 0], x[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_sums_slots_and_never_reads_past_them(dtype: torch.dtype) -> None:
    rows = torch.randn(8, 16).to(dtype)
    rows[0] = torch.nan
    row_map, weights = torch.tensor([[3, -1], [-1, -1], [2, 2]]), torch.rand(3, 2)
    weights[0, 1] = torch.nan
    got = combine(rows, row_map, weights, torch.float32)
    want = torch.stack([weights[0, 0] * rows[3].float(), torch.zeros(16), weights[2].sum() * rows[2].float()])
    # Two fp32 roundings per slot.
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_combine_accumulates_in_fp32_and_rounds_once() -> None:
    # In bf16 every step of 2**-9 beside 1 would be lost.
    rows = torch.tensor([[1.0], *[[2.0**-9]] * 8]).bfloat16()
    got = combine(rows, torch.arange(9).view(1, 9), torch.ones(1, 9), torch.bfloat16, complete=True)
    assert float(got) == 1.0 + 2.0**-6


def test_combine_leaves_its_inputs_alone() -> None:
    rows, weights = torch.randn(4, 3), torch.rand(2, 2)
    before = rows.clone(), weights.clone()
    combine(rows, torch.tensor([[0, 1], [2, 3]]), weights, torch.float32)
    assert torch.equal(rows, before[0])
    assert torch.equal(weights, before[1])
