"""What the vendor's Python does between a caller and the compiled layer, as far as this plugin calls it."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from emulated_deep_ep import Config, EventHandle, Runtime, low_latency_bytes

Tensor = torch.Tensor


class Buffer:
    """One group's buffer."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False,
    ) -> None:
        size = group.size()
        self.group_size, self.explicitly_destroy = size, explicitly_destroy
        self.runtime = Runtime(group.rank(), size, num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy)
        if low_latency_mode:
            os.environ["NVSHMEM_IB_ENABLE_IBGDA"] = "1"
            self.depth = int(os.environ["NVSHMEM_QP_DEPTH"])
        self.runtime.sync(range(size), [b""] * size, self.runtime.get_local_nvshmem_unique_id())

    def destroy(self) -> None:
        if not self.explicitly_destroy:
            raise AssertionError("explicitly_destroy")
        self.runtime.destroy()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(20, 6, 256)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(20, 4, 256)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        return self.runtime.get_dispatch_layout(topk_idx, num_experts, None, False, False)

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: Tensor | None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        expert_alignment: int = 1,
        config: Config | None = None,
        async_finish: bool = False,
    ) -> tuple[Any, ...]:
        rows, scales = x if isinstance(x, tuple) else (x, None)
        sent = (topk_idx, topk_weights, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
        config = config or self.get_dispatch_config(self.group_size)
        rest = (0, None, None, expert_alignment, 0, config, None, async_finish, False)
        found = self.runtime.intranode_dispatch(rows, scales, *sent, *rest)
        received, handle = found[:2] if isinstance(x, tuple) else found[0], (found[5], *found[7:10])
        return received, *found[2:5], handle, found[10]

    def combine(self, x: Tensor, handle: Any, config: Config | None = None) -> tuple[Any, ...]:
        prefix, channels, sources, head = handle
        rest = (config or self.get_combine_config(self.group_size), None, False, False)
        return self.runtime.intranode_combine(x, None, None, None, sources, prefix, channels, head, *rest)

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:
        if self.depth < 2 * (num_max_dispatch_tokens_per_rank + 1):
            raise AssertionError("nvshmem_qp_depth")
        sizes = (num_max_dispatch_tokens_per_rank, num_experts)
        form = (use_fp8, round_scale, use_ue8m0, False, return_recv_hook)
        rows, scales, counts, info, ranges, event, hook = self.runtime.low_latency_dispatch(
            x, topk_idx, None, None, *sizes, *form
        )
        return (rows, scales) if use_fp8 else rows, counts, (info, ranges, *sizes), event, hook

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any, return_recv_hook: bool = False
    ) -> tuple[Any, EventHandle, Any]:
        info, ranges, *sizes = handle
        rest = (False, False, False, return_recv_hook, None)
        return self.runtime.low_latency_combine(x, topk_idx, topk_weights, info, ranges, None, *sizes, *rest)
