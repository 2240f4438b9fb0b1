"""Slots by expert, in every layout, against the torch permutation."""

from __future__ import annotations

import pytest
import torch
from triton_layers import DEVICE

from moe_core.kernels.permute import masked_row_map, permute

pytest.importorskip("triton", reason="needs triton")
from moe_core.kernels.triton import sort
from moe_core.kernels.triton.launch import Launches
from moe_core.kernels.triton.permute import gather_rows
from moe_core.kernels.triton.sort_kernels import sort_pairwise

BLOCK = 4
#: Tokens, top-k, experts: one token, many experts, a number that is no power of two, several blocks.
SIZES = [(1, 8, 8), (5, 8, 128), (7, 3, 5), (100, 3, 3)]


def _tiles(counts: list[int], starts: list[int]) -> list[list[int]]:
    return [
        [expert, row, start + count, (row - start) // BLOCK, 0]
        for expert, (count, start) in enumerate(zip(counts, starts, strict=True))
        for row in range(start, start + count, BLOCK)
    ]


@pytest.mark.parametrize("pairwise", [8192, 0], ids=["pairwise", "counted"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_slots_have_the_rows_of_the_torch_permutation(
    size: tuple[int, int, int], pairwise: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sort, "_PAIRWISE_SLOTS", pairwise)
    tokens, top_k, experts = size
    ids = torch.randint(-1, experts, (tokens, top_k))
    got, want = sort.sort_slots(ids.to(DEVICE), experts, BLOCK), permute(ids, experts)
    assert torch.equal(got.group_ends.cpu(), want.group_ends)
    assert torch.equal(got.num_tokens_per_expert.cpu(), want.num_tokens_per_expert)
    assert torch.equal(got.row_map.cpu().long(), want.row_map)
    routed = want.row_map >= 0
    assert torch.equal(got.order.cpu()[want.row_map[routed]].long(), routed.flatten().nonzero()[:, 0])
    wanted = _tiles(want.num_tokens_per_expert.tolist(), [0, *want.group_ends.tolist()[:-1]])
    assert got.tiles.table[: len(wanted)].tolist() == wanted
    assert (got.tiles.table[len(wanted) :, 0] == -1).all()


@pytest.mark.parametrize("pairwise", [8192, 0], ids=["pairwise", "counted"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_groups_are_padded_or_have_blocks_as_those_of_torch(
    size: tuple[int, int, int], pairwise: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sort, "_PAIRWISE_SLOTS", pairwise)
    tokens, top_k, experts = size
    ids = torch.randint(-1, experts, (tokens, top_k))
    got, want = sort.permute(ids.to(DEVICE), experts, 8), permute(ids, experts, 8)
    counts, ends = want.num_tokens_per_expert, want.group_ends
    assert torch.equal(got.group_ends.cpu(), ends)
    assert torch.equal(got.num_tokens_per_expert.cpu(), counts)
    assert torch.equal(got.row_map.cpu().long(), want.row_map)
    tiles = sort.group_tiles(got.num_tokens_per_expert, got.num_rows, BLOCK, group_ends=got.group_ends).table
    wanted = _tiles(counts.tolist(), [0, *ends.tolist()[:-1]])
    assert tiles[: len(wanted)].tolist() == wanted
    assert (tiles[len(wanted) :, 0] == -1).all()
    blocks, masked = sort.masked_row_map(ids.to(DEVICE), experts, tokens * top_k)
    assert torch.equal(blocks.cpu().long(), masked_row_map(ids, experts, tokens * top_k)[0])
    assert torch.equal(masked.cpu(), counts)


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("one_step", [2048, 0])
def test_more_slots_are_compared_at_once_or_in_steps(
    one_step: int, alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sort, "_ONE_STEP", one_step)
    # What is compiled is kept.
    monkeypatch.setattr(sort, "_pairwise", Launches(sort_pairwise))
    ids = torch.randint(-1, 40, (140, 8))
    got, want = sort.permute(ids.to(DEVICE), 40, alignment), permute(ids, 40, alignment)
    assert torch.equal(got.row_map.cpu().long(), want.row_map)
    assert torch.equal(got.group_ends.cpu(), want.group_ends)


def test_rows_hold_their_tokens_times_a_weight() -> None:
    ids, weights = torch.tensor([[1, -1], [0, 1], [1, 1]]), torch.rand(3, 2)
    tokens = torch.randn(3, 5)
    slots = sort.sort_slots(ids.to(DEVICE), 2, BLOCK)
    rows = gather_rows(tokens.to(DEVICE), slots, weights.to(DEVICE)).cpu()
    for (token, slot), row in zip([(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)], [1, 0, 2, 3, 4], strict=True):
        assert slots.row_map[token, slot] == row
        assert torch.equal(rows[row], tokens[token] * weights[token, slot])
    assert rows[5].isnan().all(), "rows without a slot are not written"


def test_groups_of_equal_size_have_their_own_tiles() -> None:
    counts = torch.tensor([3, 0, 9], dtype=torch.int32, device=DEVICE)
    table = sort.group_tiles(counts, 30, BLOCK).table.tolist()
    assert table[:4] == [[0, 0, 3, 0, 0], [2, 20, 29, 0, 0], [2, 24, 29, 1, 0], [2, 28, 29, 2, 0]]
