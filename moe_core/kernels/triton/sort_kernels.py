"""The kernels that sort slots by expert and cut groups into tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.triton.rows import TILE_COUNT, TILE_FIELDS

# Sizes that change with the tokens: a kernel for each of their divisors would be compiled while a request waits.
_SIZES = ["num_slots", "num_tiles", "num_blocks", "group_rows"]


@triton.jit(do_not_specialize=_SIZES)
def tile_groups(
    counts_ptr, ends_ptr, table, num_experts, num_tiles, group_rows, BM: tl.constexpr, EXPERTS: tl.constexpr
):
    """The tiles of groups that exist already; without their ends they have `group_rows` rows each."""
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
        entry = table + TILE_FIELDS * (first + index)
        used = index < per_expert
        tl.store(entry, experts, mask=used)
        tl.store(entry + 1, starts + index * BM, mask=used)
        tl.store(entry + 2, starts + counts, mask=used)
        tl.store(entry + 3, index, mask=used)
        tl.store(entry + TILE_COUNT, 0, mask=used)
    total = tl.sum(per_expert)
    for start in range(0, num_tiles, EXPERTS):
        unused = start + experts
        tl.store(table + TILE_FIELDS * unused, -1, mask=(unused >= total) & (unused < num_tiles))


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
def _starts(counts, group_rows, EXPERTS: tl.constexpr, ALIGNMENT: tl.constexpr, MASKED: tl.constexpr):
    """First row of each expert's group, and row after it; if MASKED, groups are blocks of `group_rows` rows."""
    if MASKED:
        starts = tl.arange(0, EXPERTS) * group_rows
        ends = starts + group_rows
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
    group_rows,
    BM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MASKED: tl.constexpr,
):
    starts, ends = _starts(counts, group_rows, EXPERTS, ALIGNMENT, MASKED)
    experts = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + experts, counts, mask=experts < num_experts)
    tl.store(ends_ptr + experts, ends, mask=experts < num_experts)
    if table is not None:
        _write_tiles(table, counts, starts, num_tiles, BM, EXPERTS)


@triton.jit
def _count_all(ids_ptr, num_slots, num_experts, EXPERTS: tl.constexpr, STEP: tl.constexpr, CHECK: tl.constexpr):
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for start in range(0, num_slots, STEP):
        counts += _count(_load_ids(ids_ptr, start + tl.arange(0, STEP), num_slots, num_experts, CHECK), EXPERTS)
    return counts


@triton.jit
def _slots_before(ids_ptr, mine, expert, first, count, num_slots, num_experts, STEP: tl.constexpr, DENSE: tl.constexpr):
    """How many of `count` slots from `first` on come before each of `mine`: earlier ones of its expert.

    If DENSE, all slots of experts before it too.
    """
    before = tl.zeros_like(mine)
    for start in range(0, count, STEP):
        others = first + start + tl.arange(0, STEP)
        other = _load_ids(ids_ptr, others, num_slots, num_experts, False)
        is_before = (other[None, :] == expert[:, None]) & (others[None, :] < mine[:, None])
        if DENSE:
            is_before = is_before | ((other[None, :] >= 0) & (other[None, :] < expert[:, None]))
        before += tl.sum(is_before.to(tl.int32), axis=1)
    return before


@triton.jit
def _write_rows(order, row_map, slots, num_slots, expert, row, group_rows, MASKED: tl.constexpr):
    has_row = expert >= 0
    if MASKED:
        # A full block has no row for another slot; its count tells.
        has_row &= row < (expert + 1) * group_rows
    if order is not None:
        tl.store(order + row, slots, mask=has_row)
    tl.store(row_map + slots, tl.where(has_row, row, -1), mask=slots < num_slots)


@triton.jit(do_not_specialize=_SIZES)
def sort_pairwise(
    ids_ptr,
    order,
    row_map,
    counts_ptr,
    ends_ptr,
    table,
    num_slots,
    num_experts,
    num_tiles,
    group_rows,
    BM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    COUNT_STEP: tl.constexpr,
    CHECK: tl.constexpr,
):
    """The first program makes the tiles; each other one counts how many slots come before each of its own."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program == 0:
        counts = _count_all(ids_ptr, num_slots, num_experts, EXPERTS, COUNT_STEP, CHECK)
        _write_groups(
            counts_ptr, ends_ptr, table, counts, num_experts, num_tiles, group_rows, BM, EXPERTS, ALIGNMENT, MASKED
        )
    else:
        # Back to back, a slot's row is the number of slots before it; otherwise its place inside the group counts.
        DENSE: tl.constexpr = ALIGNMENT == 1 and not MASKED
        mine = (program - 1) * BLOCK + tl.arange(0, BLOCK)
        expert = _load_ids(ids_ptr, mine, num_slots, num_experts, False)
        row = _slots_before(ids_ptr, mine, expert, 0, num_slots, num_slots, num_experts, STEP, DENSE)
        if not DENSE:
            counts = _count_all(ids_ptr, num_slots, num_experts, EXPERTS, COUNT_STEP, False)
            starts, _ = _starts(counts, group_rows, EXPERTS, ALIGNMENT, MASKED)
            row += tl.gather(starts, tl.where(expert < 0, 0, expert), 0)
        _write_rows(order, row_map, mine, num_slots, expert, row, group_rows, MASKED)


@triton.jit(do_not_specialize=_SIZES)
def count_blocks(
    ids_ptr,
    counts,
    num_slots,
    num_experts,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHECK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Slots per expert in each block of slots."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    ids = _load_ids(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), num_slots, num_experts, CHECK)
    experts = tl.arange(0, EXPERTS)
    tl.store(counts + block * num_experts + experts, _count(ids, EXPERTS), mask=experts < num_experts)


@triton.jit(do_not_specialize=_SIZES)
def add_up_blocks(by_block, counts_ptr, num_experts, num_blocks, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """In place of the slots of each block, those of all blocks before it; and those of all blocks."""
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK):
        blocks = first + tl.arange(0, BLOCK)[:, None]
        there = (blocks < num_blocks) & (experts[None, :] < num_experts)
        pointers = by_block + blocks * num_experts + experts[None, :]
        count = tl.load(pointers, mask=there, other=0)
        tl.store(pointers, total[None, :] + tl.cumsum(count, 0) - count, mask=there)
        total += tl.sum(count, axis=0)
    tl.store(counts_ptr + experts, total, mask=experts < num_experts)


@triton.jit(do_not_specialize=_SIZES)
def place_blocks(
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
    group_rows,
    BM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of one block: after the same expert in earlier blocks, in order inside the block."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0)
    earlier = tl.load(by_block + block * num_experts + experts, mask=experts < num_experts, other=0)
    starts, _ = _starts(counts, group_rows, EXPERTS, ALIGNMENT, MASKED)
    mine = block * BLOCK + tl.arange(0, BLOCK)
    expert = _load_ids(ids_ptr, mine, num_slots, num_experts, False)
    row = tl.gather(starts + earlier, tl.where(expert < 0, 0, expert), 0)
    row += _slots_before(ids_ptr, mine, expert, block * BLOCK, BLOCK, num_slots, num_experts, 32, False)
    _write_rows(order, row_map, mine, num_slots, expert, row, group_rows, MASKED)
    if block == 0:
        _write_groups(
            counts_ptr, ends_ptr, table, counts, num_experts, num_tiles, group_rows, BM, EXPERTS, ALIGNMENT, MASKED
        )
