"""A library that writes down its calls and sends nothing."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

import torch
from moe_plugin_ascend.deepep_buffers import Geometry

VARIABLES = ("DEEP_NORMAL_MODE_USE_INT8_QUANT", "MOE_ENABLE_TOPK_NEG_ONE")


class Recorder:
    """A buffer of one geometry; `old` lacks the arguments of newer libraries, `lies` sends bf16 whatever is asked."""

    old, lies, seconds = False, False, 0.0
    seen: ClassVar[list[tuple[str, dict[str, Any], tuple[str | None, ...]]]] = []

    def __init__(self, process_group: Any, geometry: Geometry) -> None:
        self.geometry = geometry
        if not self.old:
            self.dispatch, self.low_latency_dispatch = self._dispatch, self._low_latency_dispatch
            self.fused_deep_moe = self._fused

    def note(self, name: str, **arguments: Any) -> None:
        before = tuple(map(os.environ.get, VARIABLES))
        time.sleep(self.seconds)
        if tuple(map(os.environ.get, VARIABLES)) != before:
            raise AssertionError("a variable changed during the call")
        self.seen.append((name, arguments, before))

    def received(self, rows: int, x: torch.Tensor, int8: bool) -> Any:
        if int8 and not self.lies:
            return torch.zeros(rows, x.shape[1], dtype=torch.int8), torch.ones(rows)
        return torch.zeros(rows, x.shape[1], dtype=torch.bfloat16)

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        return "per rank", None, [0] * num_experts, "in rank", None

    def dispatch(
        self,
        x: Any,
        num_tokens_per_rank: Any,
        num_tokens_per_rdma_rank: Any,
        is_token_in_rank: Any,
        num_tokens_per_expert: Any,
        topk_idx: Any,
        topk_weights: Any,
    ) -> Any:
        return self._dispatch(x, num_tokens_per_expert, topk_idx=topk_idx, topk_weights=topk_weights)

    def _dispatch(self, x: Any, num_tokens_per_expert: Any, quant_mode: str | None = None, **more: Any) -> Any:
        self.note("dispatch", x=x, quant_mode=quant_mode, **more)
        int8 = (quant_mode or {"1": "int8"}.get(os.environ.get(VARIABLES[0], ""))) == "int8"
        return self.received(1, x, int8), None, None, num_tokens_per_expert[::2], "handle", None

    def combine(self, x: Any, handle: Any) -> Any:
        self.note("combine", x=x, handle=handle)
        return torch.zeros(1, x.shape[1], dtype=torch.bfloat16), None, None

    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
    ) -> Any:
        return self._low_latency_dispatch(
            x=x,
            topk_idx=topk_idx,
            num_max_dispatch_tokens_per_rank=num_max_dispatch_tokens_per_rank,
            num_experts=num_experts,
            use_fp8=use_fp8,
        )

    def _low_latency_dispatch(
        self,
        x: Any,
        num_experts: int,
        use_fp8: bool,
        topk_weights: Any = None,
        quant_mode: str | None = None,
        **more: Any,
    ) -> Any:
        arguments = {"x": x, "num_experts": num_experts, "use_fp8": use_fp8, "topk_weights": topk_weights}
        self.note("low_latency_dispatch", quant_mode=quant_mode, **arguments, **more)
        counts = torch.zeros(num_experts // 2, dtype=torch.int64)
        return self.received(8, x, use_fp8), counts, "handle", None, None

    def low_latency_combine(self, x: Any, topk_idx: Any, **arguments: Any) -> Any:
        self.note("low_latency_combine", x=x, topk_idx=topk_idx, **arguments)
        return torch.zeros(len(topk_idx), x.shape[1], dtype=torch.bfloat16), None, None

    def fused_deep_moe(self, x: Any) -> Any:
        raise NotImplementedError

    def _fused(self, x: Any, fuse_mode: int = 1, **arguments: Any) -> Any:
        self.note("fused_deep_moe", x=x, fuse_mode=fuse_mode, **arguments)
        return torch.zeros_like(x), None
