"""Bare calls to time DeepEP's dispatchers and layers by: of the library itself, and of NCCL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import attrs
import torch
import torch.distributed as dist
from ep_ranks import DEVICE, Tokens

from moe_core.activation import SWIGLU
from moe_core.kernels import ops
from moe_core.specs import TokenDtype


@attrs.frozen(eq=False)
class LowLatency:
    """Calls of a buffer in low-latency mode on one rank's tokens, and a layer wired by hand around them.

    What waits for the tokens is a receive hook, or the library's own stream.

    Attributes:
        buffer: The library's.
        capacity: Most tokens of a rank.
        num_experts: Of all ranks.
        tokens: Hidden states, ids and weights.
        weights: `w13` and `w2` of this rank's experts, bf16.
        waits: Whether the host waits for the device.
    """

    waits: ClassVar[bool] = False
    buffer: Any
    capacity: int
    num_experts: int
    tokens: Tokens
    weights: tuple[torch.Tensor, torch.Tensor]

    def exchanges(self) -> dict[str, Callable[[], Any]]:
        """Dispatch and combine."""
        return {
            "bare, receive hooks": partial(self.there_and_back, hook=True),
            "bare, the library's stream": partial(self.there_and_back, hook=False),
            "bare, results written where combine sends from": partial(self.in_place, fp8=False),
            "the same, fp8 there": partial(self.in_place, fp8=True),
        }

    def layers(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Whole layers."""
        return {
            "by hand, the library's stream": partial(self.layer, hook=False),
            "by hand, receive hooks": partial(self.layer, hook=True),
        }

    def dispatch(self, *, hook: bool, fp8: bool = False) -> tuple[Any, torch.Tensor, Any]:
        """Blocks of rows, rows of each expert, and the handle."""
        hidden, ids, _ = self.tokens
        rows, counts, handle, _, receive = self.buffer.low_latency_dispatch(
            x=hidden,
            topk_idx=ids,
            num_max_dispatch_tokens_per_rank=self.capacity,
            num_experts=self.num_experts,
            use_fp8=fp8,
            return_recv_hook=hook,
        )
        if hook:
            receive()
        return rows, counts, handle

    def combine(self, rows: torch.Tensor, handle: Any, *, hook: bool, zero_copy: bool = False) -> torch.Tensor:
        """Weighted sums of this rank's tokens; with `zero_copy` of rows that lie where the library sends from."""
        _, ids, weights = self.tokens
        combined, _, receive = self.buffer.low_latency_combine(
            x=rows, topk_idx=ids, topk_weights=weights, handle=handle, zero_copy=zero_copy, return_recv_hook=hook
        )
        if hook:
            receive()
        return combined  # type: ignore[no-any-return]

    def there_and_back(self, *, hook: bool) -> torch.Tensor:
        """Dispatch, and combine of what arrived."""
        rows, _, handle = self.dispatch(hook=hook)
        return self.combine(rows, handle, hook=hook)

    def in_place(self, *, fp8: bool) -> torch.Tensor:
        """Dispatch, and combine of what was written where combine sends it from."""
        handle = self.dispatch(hook=True, fp8=fp8)[2]
        space = self.buffer.get_next_low_latency_combine_buffer(handle)
        # Only its shape is looked at: the rows are where the library gave space for them.
        return self.combine(space.new_empty(space.shape), handle, hook=True, zero_copy=True)

    def layer(self, *, hook: bool) -> torch.Tensor:
        """A bf16 layer."""
        import deep_gemm

        tokens, counts, handle = self.dispatch(hook=hook)
        (w13, w2), (num_tokens, top_k) = self.weights, self.tokens[1].shape
        expected = max(1, num_tokens * top_k * dist.get_world_size() // self.num_experts)
        first = torch.empty(*tokens.shape[:2], w13.shape[1], dtype=torch.bfloat16, device=DEVICE)
        deep_gemm.m_grouped_bf16_gemm_nt_masked(a=tokens, b=w13, d=first, masked_m=counts, expected_m=expected)
        inner = ops.activate(first, SWIGLU, real=counts)
        second = torch.empty_like(tokens)
        deep_gemm.m_grouped_bf16_gemm_nt_masked(a=inner, b=w2, d=second, masked_m=counts, expected_m=expected)
        return self.combine(second, handle, hook=hook)


@attrs.frozen(eq=False)
class Normal:
    """Calls of a buffer in normal mode on one rank's tokens.

    Attributes:
        buffer: The library's.
        num_experts: Of all ranks.
        tokens: Hidden states, ids and weights.
        configs: Multiprocessors and chunks of dispatch and of combine.
        waits: Whether the host waits for the device.
    """

    waits: ClassVar[bool] = True
    buffer: Any
    num_experts: int
    tokens: Tokens
    configs: tuple[Any, Any]

    def layout(self) -> Any:
        """What dispatch has to know about the ids."""
        return self.buffer.get_dispatch_layout(topk_idx=self.tokens[1], num_experts=self.num_experts)

    def dispatch(self, config: Any, most: int = 0, layout: Any = None, codes: Any = None) -> tuple[Any, Any]:
        """Received rows and the handle.

        Args:
            config: Multiprocessors and chunks.
            most: Rows to make room for without counting; 0 to count them.
            layout: What `layout` gave for these ids; None to find it.
            codes: Tokens in fp8 with their scales; None for the tokens as they are.
        """
        hidden, ids, weights = self.tokens
        per_rank, _, per_expert, in_rank, _ = self.layout() if layout is None else layout
        found = self.buffer.dispatch(
            x=hidden if codes is None else codes,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            expert_alignment=128,
            num_worst_tokens=most,
            config=config,
        )
        return found[0], found[4]

    def dispatch_again(self, handle: Any, config: Any) -> Any:
        """Dispatch alone, as a handle of the same multiprocessors says."""
        return self.buffer.dispatch(x=self.tokens[0], handle=handle, config=config)

    def combine(self, rows: torch.Tensor, handle: Any, config: Any) -> Any:
        """Combine alone."""
        return self.buffer.combine(x=rows, handle=handle, config=config)

    def there_and_back(self, to: Any, fro: Any, most: int = 0) -> Any:
        """All of it."""
        return self.combine(*self.dispatch(to, most), fro)

    def layers(self) -> dict[str, Callable[[], torch.Tensor]]:
        """None is wired by hand."""
        return {}

    def exchanges(self) -> dict[str, Callable[[], Any]]:
        """What of dispatch and combine takes how long, and tokens in fp8."""
        to, fro = self.configs
        codes, layout = ops.quantize(self.tokens[0], TokenDtype("fp8", "row_128")), self.layout()
        rows, handle = self.dispatch(to)
        return {
            "bare": lambda: self.there_and_back(to, fro),
            "layout alone": self.layout,
            "bare, layout known": lambda: self.combine(*self.dispatch(to, layout=layout), fro),
            "bare, counts known": lambda: self.combine(self.dispatch_again(handle, to)[0], handle, fro),
            "dispatch alone, counts known": lambda: self.dispatch_again(handle, to),
            "combine alone": lambda: self.combine(rows, handle, fro),
            "bare, fp8 there": lambda: self.combine(rows, self.dispatch(to, codes=codes)[1], fro),
        }


def nccl(tokens: Tokens, num_experts: int, *, per_rank: bool) -> Callable[[], Any]:
    """Two calls of NCCL that send copies of tokens, of counts that are known, and send them back.

    Args:
        tokens: Hidden states, ids and weights of this rank.
        num_experts: Of all ranks, a multiple of their number.
        per_rank: One copy of a token for each rank that has an expert of it, as the normal mode sends; otherwise one
            for each of its experts, as the low-latency mode sends, and whoever does not look for equal ranks.
    """
    hidden, ids, _ = tokens
    size = dist.get_world_size()
    owner = ids // (num_experts // size)
    if per_rank:
        wanted = (owner[..., None] == torch.arange(size, device=DEVICE)).any(1)
        rank, token = wanted.T.nonzero(as_tuple=True)
    else:
        rank, order = owner.flatten().sort(stable=True)
        token = order // ids.shape[1]
    copies = hidden[token].contiguous()
    sent = torch.bincount(rank, minlength=size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    counts_out, counts_in = sent.tolist(), received.tolist()
    there, back = copies.new_empty((sum(counts_in), copies.shape[1])), torch.empty_like(copies)

    def call() -> None:
        dist.all_to_all_single(there, copies, counts_in, counts_out)
        dist.all_to_all_single(back, there, counts_out, counts_in)

    return call
