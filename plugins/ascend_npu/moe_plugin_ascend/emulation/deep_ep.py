"""Ascend's `deep_ep`, over any transport that torch.distributed has: the same names, signatures and refusals.

Every rank shows everything it sends to all others and picks what is its own: slow, and free of any code that a
dispatcher could share mistakes with. Rows that the library leaves undefined are poisoned.

Signatures, shapes and dtypes are those of sgl-kernel-npu in August 2026. What was not known is in `ASSUMPTIONS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from moe_plugin_ascend.emulation import fuseep
from moe_plugin_ascend.emulation.transport import Rows, every_rank, returned, round_to_int8, rows_for

Tensor: TypeAlias = torch.Tensor

#: What this module takes for granted about compiled code that it has never seen run.
ASSUMPTIONS = (
    "rows of one expert come in the order of their ranks, and of the tokens inside a rank",
    "rows are rounded to int8 with amax / 127, to nearest and ties to even; a row of zeros has scale zero",
    "combine multiplies in fp32, adds in the order of the slots, and rounds once",
    "a token may name an expert twice and then has two rows",
    "the low-latency mode reads MOE_ENABLE_TOPK_NEG_ONE in every call; without it an id of -1 is refused here, "
    "where the library would take it for an expert",
    "a tensor without rows is refused outside the normal mode, where the documents say that it is padded",
    "the fused modes round where their documents and tests say, and skip slots with id -1",
)


class FuseMode(IntEnum):
    """The operators behind `fused_deep_moe`."""

    FUSED_DEEP_MOE = 1
    DISPATCH_FFN_COMBINE = 2


class EventOverlap:
    """An event that is over."""


class Buffer:
    """The communication buffer of one group of ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 12,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        normal_strategy: str = "default",
        low_latency_strategy: str = "default",
    ) -> None:
        """A buffer of this rank; sizes are noted only."""
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes for one row of every token and expert."""
        return num_max_dispatch_tokens_per_rank * hidden * num_ranks * num_experts * 2

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """What this rank sends to every rank and to every expert."""
        _require(topk_idx.dtype == torch.int64 and topk_idx.is_contiguous(), "topk_idx: contiguous int64")
        _require(num_experts % self.group_size == 0, f"{num_experts} experts for {self.group_size} ranks")
        names = topk_idx[..., None] == torch.arange(num_experts)
        per_expert = names.sum((0, 1))
        is_in_rank = names.any(1).view(len(topk_idx), self.group_size, -1).any(2)
        return is_in_rank.sum(0).int(), None, per_expert.int(), is_in_rank.int(), EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        quant_mode: str | None = None,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None, list[int], Any, EventOverlap]:
        """The rows of this rank's experts; at least one, which is undefined if none arrives."""
        _require(handle is None, "handle is not supported")
        _require(num_tokens_per_rank is not None and is_token_in_rank is not None, "the dispatch layout is missing")
        _require(quant_mode in (None, "bf16", "int8"), f"quant_mode {quant_mode} on this device")
        if topk_idx is None or topk_weights is None or num_tokens_per_expert is None:
            raise RuntimeError("ids, weights and counts per expert are needed")
        _check_tokens(x, topk_idx, topk_weights)
        if quant_mode is None:
            quant_mode = "int8" if os.getenv("DEEP_NORMAL_MODE_USE_INT8_QUANT") == "1" else "bf16"
        rows = rows_for(self.group, x, topk_idx, num_tokens_per_expert.numel())
        counts = rows.counts.cumsum(0) if os.getenv("MOE_EXPERT_TOKEN_NUMS_TYPE") == "0" else rows.counts
        received = _packed(rows, max(1, rows.values.shape[0]), quant_mode == "int8")
        return received, None, None, counts.tolist(), (rows, topk_idx, topk_weights), EventOverlap()

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        combine_send_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The weighted sums of this rank's tokens; the weights are those of the dispatch, whatever is given here."""
        rows, ids, weights = handle
        return self._combined(x, rows, ids, weights), None, EventOverlap()

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_mxfp4: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        topk_weights: Tensor | None = None,
        quant_mode: str | None = None,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, Any, EventOverlap, Callable[[], None]]:
        """As many rows as may ever arrive, of which those of the counts are defined; counts int64 on the device."""
        _require(self.low_latency_mode, "this buffer was not made for the low-latency mode")
        _require(0 < x.shape[0] <= num_max_dispatch_tokens_per_rank, f"{x.shape[0]} tokens")
        _require(not (use_mxfp4 or use_ue8m0) and quant_mode in (None, "int8"), "this dtype on this device")
        _check_tokens(x, topk_idx, topk_weights)
        _check_skipping(topk_idx)
        rows = rows_for(self.group, x, topk_idx, num_experts)
        most = num_max_dispatch_tokens_per_rank * self.group_size * min(topk_idx.shape[1], rows.counts.numel())
        received = _packed(rows, most, quant_mode == "int8" or use_fp8)
        return received, rows.counts, rows, EventOverlap(), _nothing

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Any,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        """The weighted sums of this rank's tokens."""
        _check_skipping(topk_idx)
        return self._combined(x, handle, topk_idx, topk_weights), EventOverlap(), _nothing

    def fused_deep_moe(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        gmm1_permuted_weight: Tensor,
        gmm1_permuted_weight_scale: Tensor,
        gmm2_weight: Tensor,
        gmm2_weight_scale: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        quant_mode: int = 1,
        fuse_mode: int = FuseMode.FUSED_DEEP_MOE,
        profile_enable: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Dispatch, both projections and combine."""
        _require(quant_mode == 1, "only int8 is emulated")
        _require(x.shape[0] > 0, "no token")
        _check_tokens(x, topk_idx, topk_weights)
        rows = rows_for(self.group, x, topk_idx, num_experts)
        most = x.shape[0] if fuse_mode == FuseMode.FUSED_DEEP_MOE else rows.values.shape[0]
        _require(most <= num_max_dispatch_tokens_per_rank, f"{most} exceed {num_max_dispatch_tokens_per_rank}")
        weights = (gmm1_permuted_weight, gmm1_permuted_weight_scale, gmm2_weight, gmm2_weight_scale)
        done = fuseep.MODES[FuseMode(fuse_mode)](rows, *weights)
        counts = rows.counts.int()
        if fuse_mode == FuseMode.FUSED_DEEP_MOE:
            counts = torch.stack(every_rank(self.group, counts)).flatten()
        return self._combined(done, rows, topk_idx, topk_weights), counts

    def _combined(self, x: Tensor, rows: Rows, ids: Tensor, weights: Tensor) -> Tensor:
        _require(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "combine: contiguous bf16 rows")
        values = returned(self.group, x, rows, ids).float()
        weighted = torch.where((ids >= 0)[..., None], values * weights[..., None], 0.0)
        total = torch.zeros(ids.shape[0], x.shape[1])
        for slot in range(ids.shape[1]):
            total += weighted[:, slot]
        return total.bfloat16()


def _packed(rows: Rows, num_rows: int, to_int8: bool) -> Tensor | tuple[Tensor, Tensor]:
    """The rows in the first places of `num_rows`, poison behind them."""
    count, hidden = rows.values.shape
    if not to_int8:
        packed = torch.full((num_rows, hidden), torch.nan, dtype=torch.bfloat16)
        packed[:count] = rows.values
        return packed
    codes, scales = torch.full((num_rows, hidden), 127, dtype=torch.int8), torch.full((num_rows,), torch.nan)
    codes[:count], scales[:count] = round_to_int8(rows.values)
    return codes, scales


def _check_tokens(x: Tensor, ids: Tensor, weights: Tensor | None) -> None:
    _require(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x: contiguous bf16 [T, H]")
    _require(
        ids.dtype == torch.int64 and ids.is_contiguous() and len(ids) == len(x), "topk_idx: contiguous int64 [T, K]"
    )
    if weights is not None:
        is_right = weights.dtype == torch.float32 and weights.is_contiguous() and weights.shape == ids.shape
        _require(is_right, "topk_weights: contiguous fp32 [T, K]")


def _check_skipping(ids: Tensor) -> None:
    skips = os.getenv("MOE_ENABLE_TOPK_NEG_ONE") == "1"
    _require(skips or bool((ids >= 0).all()), "id -1 without MOE_ENABLE_TOPK_NEG_ONE=1")


def _require(condition: bool, what: str) -> None:
    """Raise as the library's own assertions do."""
    if not condition:
        raise RuntimeError(f"deep_ep: assertion failed: {what}")


def _nothing() -> None:
    """The hook of a call that is over."""
