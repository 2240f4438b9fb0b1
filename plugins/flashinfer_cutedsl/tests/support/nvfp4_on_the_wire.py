"""DeepEP's low-latency dispatch as a build has it that rounds to NVFP4: the emulated one, and then the rounding.

Tokens come back as the library's kernels read them: `(M, H/2, L)` over memory `[L, M, H/2]`, scales in tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emulated_deep_ep
import torch

from moe_core.specs import TokenDtype
from moe_core.testing.memory import poison
from moe_core.testing.tokens import as_tokens

TOKENS = TokenDtype("nvfp4", "block_16_tiled")


def install() -> None:
    """Put it in place of the emulated one's."""
    buffer: Any = emulated_deep_ep.install().Buffer
    if not getattr(buffer, "rounds_to_nvfp4", False):
        buffer.low_latency_dispatch = _rounding(buffer.low_latency_dispatch)
        buffer.rounds_to_nvfp4 = True


def _rounding(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    def low_latency_dispatch(
        self: Any,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        x_global_scale: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_nvfp4: bool = False,
        return_recv_hook: bool = False,
    ) -> Any:
        form = {"use_fp8": use_fp8, "round_scale": round_scale, "use_ue8m0": use_ue8m0}
        rows, counts, handle, event, hook = dispatch(
            self,
            x=x,
            topk_idx=topk_idx,
            num_max_dispatch_tokens_per_rank=num_max_dispatch_tokens_per_rank,
            num_experts=num_experts,
            return_recv_hook=return_recv_hook,
            **form,
        )
        if not use_nvfp4:
            return rows, counts, handle, event, hook
        if x_global_scale is None or x_global_scale.dim() != 0 or x_global_scale.dtype != torch.float32:
            raise RuntimeError("Assertion error: x_global_scale is a float32 tensor with dim() == 0")
        scale = x_global_scale
        experts, block, hidden = rows.shape
        codes = poison(torch.empty((experts, block, hidden // 2), dtype=torch.uint8))
        tiles = poison(torch.empty((experts, block // 128, hidden // 64, 32, 4, 4), dtype=torch.uint8))

        def receive() -> None:
            hook()
            known, scales = as_tokens(rows.nan_to_num(), TOKENS, 1 / float(scale))
            for expert, count in enumerate(counts.tolist()):
                codes[expert, :count] = known[expert, :count]
            tiles.copy_(scales.view(torch.uint8).view(tiles.shape))

        return (codes.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)), counts, handle, event, receive

    return low_latency_dispatch
