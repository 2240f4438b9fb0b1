"""Rows in the order of a `SortedSlots`: the copy that `contiguous` and `masked` tokens need."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.triton.activation import row_range
from moe_core.kernels.triton.interpreter import narrow
from moe_core.kernels.triton.sort import SortedSlots
from moe_core.payloads import Tensor


def gather_rows(hidden_states: Tensor, slots: SortedSlots, row_weights: Tensor | None = None) -> Tensor:
    """`[T, H]` -> `[R, H]`: each slot's token at its row; rows without a slot are not written.

    Args:
        hidden_states: Tokens, unit stride along H.
        slots: `sort_slots` of their ids; padded groups give `contiguous` rows, `rows_per_expert` gives `masked` ones.
        row_weights: `[T, K]`, contiguous, multiplied in fp32 and rounded once; None for a plain copy.
    """
    width = hidden_states.shape[1]
    out = hidden_states.new_empty((slots.order.shape[0], width))
    block = min(2048, triton.next_power_of_2(width))
    _gather[(len(slots.tiles), triton.cdiv(width, block))](
        hidden_states,
        out,
        row_weights,
        slots.order,
        slots.tiles.table,
        slots.row_map.shape[1],
        width,
        hidden_states.stride(0),
        BM=slots.tiles.block_m,
        BLOCK=block,
    )
    return out


@triton.jit
def _gather(x, out, weights, order, tiles, top_k, width, stride, BM: tl.constexpr, BLOCK: tl.constexpr):
    first, end = row_range(tiles, tl.program_id(0), BM)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for row in range(first, end):
        slot = tl.load(order + row)
        value = tl.load(x + (slot // top_k).to(tl.int64) * stride + columns, mask=columns < width)
        if weights is not None:
            value = value.to(tl.float32) * tl.load(weights + slot).to(tl.float32)
            value = narrow(value, out.dtype.element_ty)
        tl.store(out + row * width + columns, value, mask=columns < width)
