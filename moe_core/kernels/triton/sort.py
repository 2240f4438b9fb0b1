"""Which rows belong to which expert: slots sorted by expert, and the tiles of rows that a grouped kernel works on."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import attrs
import torch

from moe_core.kernels.permute import Permutation, max_rows
from moe_core.kernels.triton import sort_kernels as kernels
from moe_core.kernels.triton.launch import Constants, Launches, divided_up, is_aligned, power_of_two
from moe_core.kernels.triton.rows import TILE_FIELDS
from moe_core.payloads import Tensor

#: Most slots that one launch sorts by comparing all pairs; more are counted block by block first.
_PAIRWISE_SLOTS = 8192
#: Slots of one program, and slots that it compares them with at a time: as many pairs as registers hold.
_PLACE_BLOCK, _PLACE_STEP = 16, 512
#: Up to so many slots all are compared at once, as a step costs more than another program does.
_ONE_STEP = 2048
_COUNT_STEP = 4096
#: Slots of one block where blocks are counted first; blocks and experts whose counts are read together, so many that
#: they are added up in one step. On an H100, 8192 tokens of 128, 256 and 512 experts took 12.6, 13.1 and 17.7 us, and
#: 19.3, 20.4 and 29.3 with 256 slots, 128 blocks and 8 experts.
_COUNT_BLOCK = 128
_ADDED_BLOCKS, _ADDED_EXPERTS = 1024, 4


_pairwise, _count, _add_up, _place = map(
    Launches, (kernels.sort_pairwise, kernels.count_blocks, kernels.add_up_blocks, kernels.place_blocks)
)


def _added_constants() -> Constants:
    return {"BLOCK": _ADDED_BLOCKS, "EXPERTS": _ADDED_EXPERTS}, {}


@attrs.define(eq=False)
class RowTiles:
    """Tiles of at most `block_m` rows, each of one expert, in ascending order of experts.

    Attributes:
        table: `[tiles, 5]` int32: expert (-1 for an unused entry, all of them at the end), first row, row after the
            expert's last, tiles of the expert before this one, and 0, where programs may count themselves.
        block_m: Rows per tile.
        usual: How many entries are usually used, a tuning hint only; None for all.
    """

    table: Tensor
    block_m: int
    usual: int | None = None

    def __len__(self) -> int:
        """Entries of the table: a bound that does not depend on data."""
        return self.table.shape[0]


@attrs.define(eq=False)
class SortedSlots:
    """Slots grouped by expert, back to back, in stable order inside a group.

    Attributes:
        order: `[T * K]` int32, the slot (`token * K + k`) of each row; undefined past the last group.
        row_map: `[T, K]` int32, the row of each slot, -1 for a slot without expert.
        num_tokens_per_expert: `[L]` int32, real rows of each expert.
        group_ends: `[L]` int32, row after each expert's group.
        tiles: The groups cut into tiles.
    """

    order: Tensor
    row_map: Tensor
    num_tokens_per_expert: Tensor
    group_ends: Tensor
    tiles: RowTiles


class _Variant(NamedTuple):
    """What the kernels are compiled for, apart from the types of their arguments.

    Attributes:
        block_m: Rows per tile.
        num_experts: Local experts `L`.
        alignment: What groups are padded to a multiple of.
        masked: Whether each expert's rows lie in a block of its own instead of back to back.
        check: Whether ids out of range stop the device.
        pdl: Whether launches may begin before those in front of them have ended.
    """

    block_m: int
    num_experts: int
    alignment: int
    masked: bool
    check: bool
    pdl: bool

    def pairwise_constants(self, slots: int) -> Constants:
        block, step = _pairs(slots)
        steps = {"BLOCK": block, "STEP": step, "COUNT_STEP": min(_COUNT_STEP, slots), "CHECK": self.check}
        return {**self._groups(), **steps}, self._options()

    def count_constants(self) -> Constants:
        experts = power_of_two(self.num_experts)
        return {"BLOCK": _COUNT_BLOCK, "EXPERTS": experts, "CHECK": self.check, "PDL": self.pdl}, self._options()

    def place_constants(self) -> Constants:
        return {**self._groups(), "BLOCK": _COUNT_BLOCK}, {}

    def _groups(self) -> dict[str, Any]:
        return {
            "BM": self.block_m,
            "EXPERTS": power_of_two(self.num_experts),
            "ALIGNMENT": self.alignment,
            "MASKED": self.masked,
            "PDL": self.pdl,
        }

    def _options(self) -> dict[str, Any]:
        # `debug` makes device assertions real; it would make additions checked ones too.
        return {"debug": self.check, "sanitize_overflow": False, "launch_pdl": self.pdl}


def _pairs(slots: int) -> tuple[int, int]:
    """Slots of one program and of one step, for a power of two of slots."""
    if slots > _ONE_STEP:
        return _PLACE_BLOCK, _PLACE_STEP
    return min(_PLACE_BLOCK, _PLACE_BLOCK * _PLACE_STEP // slots), slots


def max_tiles(num_slots: int, num_experts: int, block_m: int) -> int:
    """Most tiles that `num_slots` slots need, however they are routed."""
    first = min(num_slots, num_experts)
    return first + (num_slots - first) // block_m


def sort_slots(
    topk_ids: Tensor,
    num_experts: int,
    block_m: int,
    *,
    check: bool = False,
    pdl: bool = False,
) -> SortedSlots:
    """Sort the slots of `topk_ids` by expert, groups back to back, in one launch (three for many slots).

    Args:
        topk_ids: `[T, K]` int32 or int64 local ids, -1 = no expert; in range.
        num_experts: Local experts `L`.
        block_m: Rows per tile.
        check: Stop the device on an id out of range, instead of trusting the caller.
        pdl: This launch may start before the one in front has ended, and the next one before this (see the package).
    """
    ids = topk_ids.contiguous()
    num_slots = ids.numel()
    order = ids.new_empty((num_slots,), dtype=torch.int32)
    table = ids.new_empty((max_tiles(num_slots, num_experts, block_m), TILE_FIELDS.value), dtype=torch.int32)
    row_map, counts, ends = _sort(
        ids, num_experts, 1, None, order=order, table=table, block_m=block_m, check=check, pdl=pdl
    )
    return SortedSlots(order, row_map, counts, ends, RowTiles(table, block_m))


def permute(topk_ids: Tensor, num_experts: int, alignment: int = 1) -> Permutation:
    """As `moe_core.kernels.permute.permute`; the number of rows is its bound."""
    num_rows = max_rows(topk_ids.numel(), num_experts, alignment)
    row_map, counts, ends = _sort(topk_ids.contiguous(), num_experts, alignment, None)
    return Permutation(counts, ends, row_map, num_rows)


def masked_row_map(topk_ids: Tensor, num_experts: int, rows_per_expert: int) -> tuple[Tensor, Tensor]:
    """As `moe_core.kernels.permute.masked_row_map`."""
    row_map, counts, _ = _sort(topk_ids.contiguous(), num_experts, 1, rows_per_expert)
    return row_map, counts


def _sort(
    ids: Tensor,
    num_experts: int,
    alignment: int,
    rows_per_expert: int | None,
    *,
    order: Tensor | None = None,
    table: Tensor | None = None,
    block_m: int = 1,
    check: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Row map, counts and group ends of contiguous ids; the order and the table of tiles where they are wanted."""
    num_slots, new = ids.numel(), partial(ids.new_empty, dtype=torch.int32)
    row_map, counts, ends = new(ids.shape), new((num_experts,)), new((num_experts,))
    outputs = order, row_map, counts, ends, table
    sizes = num_slots, num_experts, 0 if table is None else len(table), rows_per_expert or 0
    variant = _Variant(block_m, num_experts, alignment, rows_per_expert is not None, check, pdl)
    # The outputs are new, and therefore aligned.
    key = variant, ids.dtype, is_aligned(ids), order is None, table is None
    if num_slots <= _PAIRWISE_SLOTS:
        power = power_of_two(num_slots)
        programs = divided_up(num_slots, _pairs(power)[0]) + 1
        _pairwise((key, power), (programs, 1, 1), (ids, *outputs, *sizes), lambda: variant.pairwise_constants(power))
    else:
        blocks = divided_up(num_slots, _COUNT_BLOCK)
        by_block = new((blocks, num_experts))
        _count(key, (blocks, 1, 1), (ids, by_block, num_slots, num_experts), variant.count_constants)
        programs = divided_up(num_experts, _ADDED_EXPERTS)
        _add_up(num_experts, (programs, 1, 1), (by_block, counts, num_experts, blocks), _added_constants)
        _place(key, (blocks, 1, 1), (ids, by_block, *outputs, *sizes), variant.place_constants)
    return row_map, counts, ends


def group_tiles(counts: Tensor, num_rows: int, block_m: int, *, group_ends: Tensor | None = None) -> RowTiles:
    """The tiles of groups that exist already.

    Args:
        counts: `[L]` int32, real rows of each expert.
        num_rows: Rows of all groups together.
        block_m: Rows per tile.
        group_ends: `[L]` int32, row after each expert's group; None for groups of equal size.
    """
    num_experts = counts.shape[0]
    table = counts.new_empty((max_tiles(num_rows, num_experts, block_m), TILE_FIELDS.value))
    kernels.tile_groups[(1,)](
        counts,
        group_ends,
        table,
        num_experts,
        len(table),
        num_rows // num_experts,
        BM=block_m,
        EXPERTS=power_of_two(num_experts),
    )
    return RowTiles(table, block_m)
