"""Ids as a communication library takes them, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_core.kernels.triton.launch import (
    Constants,
    Launches,
    divided_up,
    has_dependent_launches,
    is_aligned,
    looked_at,
)
from moe_core.payloads import Tensor

_BLOCK = 256


def checked_ids(topk_ids: Tensor, num_slots: int, table: Tensor | None = None) -> Tensor:
    """As `ops.checked_ids`; an id out of range stops the device."""
    is_contiguous, dtype, (_, top_k) = topk_ids.is_contiguous(), topk_ids.dtype, topk_ids.shape
    # To look at them is enough then.
    is_as_wanted = table is None and is_contiguous and dtype == torch.int64
    out = None if is_as_wanted else torch.empty(topk_ids.shape, dtype=torch.int64, device=topk_ids.device)
    count = topk_ids.numel()
    if count:
        # An axis of one element may have any stride.
        strides = (top_k, 1) if is_contiguous else topk_ids.stride()
        # Numbers that a layer never changes need no look, and what is new is aligned.
        kinds = table is None or looked_at(table), is_contiguous or looked_at(*strides)
        key = top_k, num_slots, dtype, is_aligned(topk_ids), out is None, kinds
        arguments = topk_ids, table, out, count, num_slots, *strides
        _launches(key, (divided_up(count, _BLOCK), 1, 1), arguments, lambda: _constants(topk_ids.device, top_k))
    return topk_ids if out is None else out


def _constants(device: torch.device, top_k: int) -> Constants:
    pdl = has_dependent_launches(device)
    # `debug` makes the assertion real; it would make additions checked ones too.
    options = {"debug": True, "sanitize_overflow": False, "launch_pdl": pdl}
    return {"TOP_K": top_k, "BLOCK": _BLOCK, "PDL": pdl}, options


@triton.jit(do_not_specialize=["count"])
def _checked_ids(
    ids,
    table,
    out,
    count,
    num_slots,
    stride_token,
    stride_slot,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, slot = place // TOP_K, place % TOP_K
    found = tl.load(ids + token * stride_token + slot * stride_slot, mask=place < count, other=-1).to(tl.int64)
    tl.device_assert((found >= -1) & (found < num_slots), "topk_ids: an expert id is out of range")
    if table is not None:
        found = tl.where(found < 0, -1, tl.load(table + found, mask=(found >= 0) & (found < num_slots), other=-1))
    if out is not None:
        tl.store(out + place, found, mask=place < count)


_launches = Launches(_checked_ids)
