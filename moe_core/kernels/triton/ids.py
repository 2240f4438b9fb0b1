"""Ids as a communication library takes them, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_core.payloads import Tensor

_BLOCK = 256


def checked_ids(topk_ids: Tensor, num_slots: int, table: Tensor | None = None) -> Tensor:
    """As `ops.checked_ids`; an id out of range stops the device."""
    out = torch.empty(topk_ids.shape, dtype=torch.int64, device=topk_ids.device)
    count = out.numel()
    if count:
        _checked_ids[(triton.cdiv(count, _BLOCK),)](
            topk_ids,
            table,
            out,
            count,
            num_slots,
            *topk_ids.stride(),
            TOP_K=topk_ids.shape[1],
            BLOCK=_BLOCK,
            # Makes the assertion real; it would make additions checked ones too.
            debug=True,
            sanitize_overflow=False,
        )
    return out


@triton.jit(do_not_specialize=["count"])
def _checked_ids(
    ids, table, out, count, num_slots, stride_token, stride_slot, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, slot = place // TOP_K, place % TOP_K
    found = tl.load(ids + token * stride_token + slot * stride_slot, mask=place < count, other=-1).to(tl.int64)
    tl.device_assert((found >= -1) & (found < num_slots), "topk_ids: an expert id is out of range")
    if table is not None:
        found = tl.where(found < 0, -1, tl.load(table + found, mask=(found >= 0) & (found < num_slots), other=-1))
    tl.store(out + place, found, mask=place < count)
