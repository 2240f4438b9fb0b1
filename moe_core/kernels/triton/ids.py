"""Ids as a communication library takes them, in one launch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from moe_core.kernels.triton.launch import Launches, divided_up, looked_at
from moe_core.payloads import Tensor

_BLOCK = 256


def checked_ids(topk_ids: Tensor, num_slots: int, table: Tensor | None = None) -> Tensor:
    """As `ops.checked_ids`; an id out of range stops the device."""
    is_as_wanted = table is None and topk_ids.dtype == torch.int64 and topk_ids.is_contiguous()
    # To look at them is enough then.
    out = None if is_as_wanted else torch.empty(topk_ids.shape, dtype=torch.int64, device=topk_ids.device)
    count, top_k, strides = topk_ids.numel(), topk_ids.shape[1], topk_ids.stride()
    if count:
        # What is new is aligned.
        key = top_k, out is None, looked_at(topk_ids, table, num_slots, *strides)
        arguments = topk_ids, table, out, count, num_slots, *strides
        _launches(key, (divided_up(count, _BLOCK), 1, 1), arguments, partial(_constants, top_k))
    return topk_ids if out is None else out


def _constants(top_k: int) -> tuple[dict[str, Any], dict[str, Any]]:
    # `debug` makes the assertion real; it would make additions checked ones too.
    return {"TOP_K": top_k, "BLOCK": _BLOCK}, {"debug": True, "sanitize_overflow": False}


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
    if out is not None:
        tl.store(out + place, found, mask=place < count)


_launches = Launches(_checked_ids)
