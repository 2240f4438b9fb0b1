"""Which rows belong to which expert: slots sorted by expert, and the tiles of rows that a grouped kernel works on."""

from __future__ import annotations

from functools import partial

import attrs
import torch
import triton
import triton.language as tl

from moe_core.kernels.permute import max_rows
from moe_core.payloads import Tensor

#: Most slots that one launch sorts by comparing all pairs; more are counted block by block first.
_PAIRWISE_SLOTS = 8192
_PLACE_BLOCK = 16
_PLACE_STEP = 512
_COUNT_STEP = 4096
_COUNT_BLOCK = 256
# Sizes that change with the tokens: a kernel for each of their divisors would be compiled while a request waits.
_SIZES = ["num_slots", "num_tiles", "num_blocks", "group_rows"]


@attrs.define(eq=False)
class RowTiles:
    """Tiles of at most `block_m` rows, each of one expert, in ascending order of experts.

    Attributes:
        table: `[tiles, 3]` int32: expert (-1 for an unused entry, all of them at the end), first row, row after the
            expert's last.
        block_m: Rows per tile.
    """

    table: Tensor
    block_m: int

    def __len__(self) -> int:
        """Entries of the table: a bound that does not depend on data."""
        return self.table.shape[0]


@attrs.define(eq=False)
class SortedSlots:
    """Slots grouped by expert, in stable order inside a group.

    Attributes:
        order: `[R]` int32, the slot (`token * K + k`) of each row; undefined for rows without one.
        row_map: `[T, K]` int32, the row of each slot, -1 for a slot without expert.
        num_tokens_per_expert: `[L]` int32, real rows of each expert.
        group_ends: `[L]` int32, row after each expert's group, padded to the alignment.
        tiles: The groups cut into tiles.
    """

    order: Tensor
    row_map: Tensor
    num_tokens_per_expert: Tensor
    group_ends: Tensor
    tiles: RowTiles


def max_tiles(num_slots: int, num_experts: int, block_m: int) -> int:
    """Most tiles that `num_slots` slots need, however they are routed."""
    first = min(num_slots, num_experts)
    return first + (num_slots - first) // block_m


def sort_slots(
    topk_ids: Tensor,
    num_experts: int,
    block_m: int,
    *,
    alignment: int = 1,
    rows_per_expert: int = 0,
    check: bool = False,
    pdl: bool = False,
) -> SortedSlots:
    """Sort the slots of `topk_ids` by expert, in one launch (two for many slots).

    Args:
        topk_ids: `[T, K]` int32 or int64 local ids, -1 = no expert; in range.
        num_experts: Local experts `L`.
        block_m: Rows per tile.
        alignment: Every group is padded to a multiple of it.
        rows_per_expert: `M` of the masked format, where expert `e` has the rows from `e * M`; 0: back to back.
        check: Stop the device on an id out of range, instead of trusting the caller.
        pdl: The next launch may start before this one has ended (see the package).
    """
    ids = topk_ids.contiguous()
    num_slots, new = ids.numel(), partial(ids.new_empty, dtype=torch.int32)
    num_rows = rows_per_expert * num_experts or max_rows(num_slots, num_experts, alignment)
    order, row_map = new((num_rows,)), new(topk_ids.shape)
    counts, ends = new((num_experts,)), new((num_experts,))
    table = new((max_tiles(num_slots, num_experts, block_m), 3))
    outputs = order, row_map, counts, ends, table
    sizes = {
        "BM": block_m,
        "EXPERTS": triton.next_power_of_2(max(num_experts, 2)),
        "ALIGNMENT": alignment,
        "ROWS": rows_per_expert,
        "PDL": pdl,
    }
    # `debug` makes device assertions real; it would make additions checked ones too.
    options = {"debug": check, "sanitize_overflow": False}
    if num_slots <= _PAIRWISE_SLOTS:
        grid = (triton.cdiv(num_slots, _PLACE_BLOCK) + 1,)
        power = triton.next_power_of_2(max(num_slots, 2))
        _sort_pairwise[grid](
            ids,
            *outputs,
            num_slots,
            num_experts,
            len(table),
            **sizes,
            BLOCK=_PLACE_BLOCK,
            STEP=min(_PLACE_STEP, power),
            COUNT_STEP=min(_COUNT_STEP, power),
            CHECK=check,
            **options,
        )
    else:
        blocks = triton.cdiv(num_slots, _COUNT_BLOCK)
        by_block = new((blocks, num_experts))
        _count_blocks[(blocks,)](
            ids, by_block, num_slots, num_experts, BLOCK=_COUNT_BLOCK, EXPERTS=sizes["EXPERTS"], CHECK=check, **options
        )
        _place_blocks[(blocks,)](
            ids, by_block, *outputs, num_slots, num_experts, len(table), blocks, **sizes, BLOCK=_COUNT_BLOCK
        )
    return SortedSlots(order, row_map, counts, ends, RowTiles(table, block_m))


def group_tiles(counts: Tensor, num_rows: int, block_m: int, *, group_ends: Tensor | None = None) -> RowTiles:
    """The tiles of groups that exist already.

    Args:
        counts: `[L]` int32, real rows of each expert.
        num_rows: Rows of all groups together.
        block_m: Rows per tile.
        group_ends: `[L]` int32, row after each expert's group; None for groups of equal size.
    """
    num_experts = counts.shape[0]
    table = counts.new_empty((max_tiles(num_rows, num_experts, block_m), 3))
    experts = triton.next_power_of_2(max(num_experts, 2))
    _tile_groups[(1,)](
        counts, group_ends, table, num_experts, len(table), num_rows // num_experts, BM=block_m, EXPERTS=experts
    )
    return RowTiles(table, block_m)


@triton.jit(do_not_specialize=_SIZES)
def _tile_groups(
    counts_ptr, ends_ptr, table, num_experts, num_tiles, group_rows, BM: tl.constexpr, EXPERTS: tl.constexpr
):
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0)
    starts = experts * group_rows
    if ends_ptr is not None:
        starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    _write_tiles(table, counts, starts, num_tiles, BM, EXPERTS)


@triton.jit
def _write_tiles(table, counts, starts, num_tiles, BM: tl.constexpr, EXPERTS: tl.constexpr):
    """Entries of all experts at once: first the first tile of each, then the second, ..."""
    experts = tl.arange(0, EXPERTS)
    per_expert = (counts + BM - 1) // BM
    first = tl.cumsum(per_expert, 0) - per_expert
    for index in range(0, tl.max(per_expert)):
        entry = table + 3 * (first + index)
        used = index < per_expert
        tl.store(entry, experts, mask=used)
        tl.store(entry + 1, starts + index * BM, mask=used)
        tl.store(entry + 2, starts + counts, mask=used)
    total = tl.sum(per_expert)
    for start in range(0, num_tiles, EXPERTS):
        unused = start + experts
        tl.store(table + 3 * unused, -1, mask=(unused >= total) & (unused < num_tiles))


@triton.jit
def _load_ids(ids_ptr, slots, num_slots, num_experts, CHECK: tl.constexpr):
    """Ids of `slots`, -1 past the end."""
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1).to(tl.int32)
    if CHECK:
        tl.device_assert((ids >= -1) & (ids < num_experts), "topk_ids: an expert id is out of range")
    return ids


@triton.jit
def _count(ids, EXPERTS: tl.constexpr):
    """Slots per expert; ids -1 are none."""
    return tl.histogram(tl.where(ids < 0, 0, ids), EXPERTS, mask=ids >= 0)


@triton.jit
def _starts(counts, EXPERTS: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr):
    """First row of each expert's group, and row after it."""
    if ROWS > 0:
        starts = tl.arange(0, EXPERTS) * ROWS
        ends = starts + ROWS
    else:
        padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        ends = tl.cumsum(padded, 0)
        starts = ends - padded
    return starts, ends


@triton.jit
def _write_groups(
    counts_ptr,
    ends_ptr,
    table,
    counts,
    num_experts,
    num_tiles,
    BM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
):
    starts, ends = _starts(counts, EXPERTS, ALIGNMENT, ROWS)
    experts = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + experts, counts, mask=experts < num_experts)
    tl.store(ends_ptr + experts, ends, mask=experts < num_experts)
    _write_tiles(table, counts, starts, num_tiles, BM, EXPERTS)


@triton.jit
def _count_all(ids_ptr, num_slots, num_experts, EXPERTS: tl.constexpr, STEP: tl.constexpr, CHECK: tl.constexpr):
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for start in range(0, num_slots, STEP):
        counts += _count(_load_ids(ids_ptr, start + tl.arange(0, STEP), num_slots, num_experts, CHECK), EXPERTS)
    return counts


@triton.jit
def _write_rows(order, row_map, slots, num_slots, expert, row):
    tl.store(order + row, slots, mask=expert >= 0)
    tl.store(row_map + slots, tl.where(expert < 0, -1, row), mask=slots < num_slots)


@triton.jit(do_not_specialize=_SIZES)
def _sort_pairwise(
    ids_ptr,
    order,
    row_map,
    counts_ptr,
    ends_ptr,
    table,
    num_slots,
    num_experts,
    num_tiles,
    BM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    COUNT_STEP: tl.constexpr,
    CHECK: tl.constexpr,
):
    """The first program makes the tiles; each other one counts how many slots come before each of its own."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program == 0:
        counts = _count_all(ids_ptr, num_slots, num_experts, EXPERTS, COUNT_STEP, CHECK)
        _write_groups(counts_ptr, ends_ptr, table, counts, num_experts, num_tiles, BM, EXPERTS, ALIGNMENT, ROWS)
    else:
        # Back to back, a slot's row is the number of slots before it; otherwise its place inside the group counts.
        DENSE: tl.constexpr = ALIGNMENT == 1 and ROWS == 0
        mine = (program - 1) * BLOCK + tl.arange(0, BLOCK)
        expert = _load_ids(ids_ptr, mine, num_slots, num_experts, False)
        row = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, num_slots, STEP):
            others = start + tl.arange(0, STEP)
            other = _load_ids(ids_ptr, others, num_slots, num_experts, False)
            before = (other[None, :] == expert[:, None]) & (others[None, :] < mine[:, None])
            if DENSE:
                before = before | ((other[None, :] >= 0) & (other[None, :] < expert[:, None]))
            row += tl.sum(before.to(tl.int32), axis=1)
        if not DENSE:
            counts = _count_all(ids_ptr, num_slots, num_experts, EXPERTS, COUNT_STEP, False)
            starts, _ = _starts(counts, EXPERTS, ALIGNMENT, ROWS)
            row += tl.gather(starts, tl.where(expert < 0, 0, expert), 0)
        _write_rows(order, row_map, mine, num_slots, expert, row)


@triton.jit(do_not_specialize=_SIZES)
def _count_blocks(
    ids_ptr, counts, num_slots, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, CHECK: tl.constexpr
):
    block = tl.program_id(0)
    ids = _load_ids(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), num_slots, num_experts, CHECK)
    experts = tl.arange(0, EXPERTS)
    tl.store(counts + block * num_experts + experts, _count(ids, EXPERTS), mask=experts < num_experts)


@triton.jit(do_not_specialize=_SIZES)
def _place_blocks(
    ids_ptr,
    by_block,
    order,
    row_map,
    counts_ptr,
    ends_ptr,
    table,
    num_slots,
    num_experts,
    num_tiles,
    num_blocks,
    BM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of one block: after the same expert in earlier blocks, in order inside the block."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    earlier = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, num_blocks, 16):
        blocks = first + tl.arange(0, 16)[:, None]
        there = (blocks < num_blocks) & (experts[None, :] < num_experts)
        count = tl.load(by_block + blocks * num_experts + experts[None, :], mask=there, other=0)
        counts += tl.sum(count, axis=0)
        earlier += tl.sum(tl.where(blocks < block, count, 0), axis=0)
    starts, _ = _starts(counts, EXPERTS, ALIGNMENT, ROWS)
    mine = block * BLOCK + tl.arange(0, BLOCK)
    expert = _load_ids(ids_ptr, mine, num_slots, num_experts, False)
    row = tl.gather(starts + earlier, tl.where(expert < 0, 0, expert), 0)
    for start in range(0, BLOCK, 32):
        others = block * BLOCK + start + tl.arange(0, 32)
        other = _load_ids(ids_ptr, others, num_slots, num_experts, False)
        same = (other[None, :] == expert[:, None]) & (others[None, :] < mine[:, None])
        row += tl.sum(same.to(tl.int32), axis=1)
    _write_rows(order, row_map, mine, num_slots, expert, row)
    if block == 0:
        _write_groups(counts_ptr, ends_ptr, table, counts, num_experts, num_tiles, BM, EXPERTS, ALIGNMENT, ROWS)
