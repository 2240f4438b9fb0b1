"""The normal mode of DeepEP under other settings, and calls of its low-latency mode that the plugin does not make."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from ep_ranks import DEVICE, MANY_TOKENS, SWEEP_CALLS, SWEEP_SAMPLES, TIMED, Bench

from moe_core.kernels import ops
from moe_core.specs import TokenDtype
from moe_core.tuning.timing import synchronize

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: Multiprocessors; tokens of a chunk that dispatch sends, and that combine sends; and of one that is received.
SMS, SENT, SENT_BACK, RECEIVED = (20, 32, 48, 64, 96, 128), (8, 16, 24, 32), (4, 8, 10, 16), (256, 512)


@attrs.frozen
class Normal:
    """Calls of a buffer in normal mode on one rank's tokens.

    Attributes:
        buffer: The library's.
        tokens: Hidden states, ids and weights.
    """

    buffer: Any
    tokens: Tokens

    def layout(self) -> Any:
        """What dispatch has to know about the ids."""
        return self.buffer.get_dispatch_layout(topk_idx=self.tokens[1], num_experts=TIMED["num_experts"])

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


def normal_variants(buffer: Any, tokens: Tokens, to: Any, fro: Any) -> dict[str, Callable[[], Any]]:
    """What of dispatch and combine in normal mode takes how long, and tokens in fp8."""
    normal = Normal(buffer, tokens)
    codes, layout = ops.quantize(tokens[0], TokenDtype("fp8", "row_128")), normal.layout()
    rows, handle = normal.dispatch(to)
    return {
        "bare": lambda: normal.there_and_back(to, fro),
        "layout alone": normal.layout,
        "bare, layout known": lambda: normal.combine(*normal.dispatch(to, layout=layout), fro),
        "bare, counts known": lambda: normal.combine(normal.dispatch_again(handle, to)[0], handle, fro),
        "dispatch alone, counts known": lambda: normal.dispatch_again(handle, to),
        "combine alone": lambda: normal.combine(rows, handle, fro),
        "bare, fp8 there": lambda: normal.combine(rows, normal.dispatch(to, codes=codes)[1], fro),
    }


def sweep_normal(bench: Bench, routed: Callable[[Bench, int], Tokens]) -> None:
    """Dispatch and combine apart under all settings, and both with those of the smallest sum."""
    from deep_ep import Buffer, Config

    largest = Config(max(SMS), max(SENT), max(RECEIVED))
    num_bytes = largest.get_nvl_buffer_size_hint(2 * TIMED["hidden_size"], bench.group.size)
    buffer = Buffer(group=bench.group.process_group, num_nvl_bytes=num_bytes, explicitly_destroy=True)
    for count in reversed(MANY_TOKENS):
        normal = Normal(buffer, routed(bench, count))
        _, to, fro = min(_setting(bench, normal, *setting) for setting in itertools.product(SMS, RECEIVED))
        configs, most = (Config(*to), Config(*fro)), bench.group.size * count
        _say(bench, f"normal mode, {count} tokens, {to} {fro}", normal.layout)
        _say(bench, "  the host waits for counts", lambda: normal.there_and_back(*configs))  # noqa: B023
        _say(bench, "  with room for the most", lambda: normal.there_and_back(*configs, most))  # noqa: B023
    synchronize(DEVICE)
    dist.barrier()
    buffer.destroy()


def _setting(bench: Bench, normal: Normal, sms: int, received: int) -> tuple[float, Any, Any]:
    """Smallest sum of dispatch and combine, which share multiprocessors, and their settings."""
    from deep_ep import Config

    rows, handle = normal.dispatch(Config(sms, 24, received))

    def best(call: Callable[[Any], Any], chunks: tuple[int, ...]) -> tuple[float, tuple[int, int, int]]:
        settings = [(sms, chunk, received) for chunk in chunks]
        times = [_time(bench, lambda one=one: call(Config(*one))) for one in settings]
        return min(zip(times, settings, strict=True))

    to = best(lambda config: normal.dispatch_again(handle, config), SENT)
    fro = best(lambda config: normal.combine(rows, handle, config), SENT_BACK)
    bench.say(
        f"{len(normal.tokens[0])} tokens: dispatch {to[0]:.1f} us with {to[1]}, combine {fro[0]:.1f} with {fro[1]}"
    )
    return to[0] + fro[0], to[1], fro[1]


def _time(bench: Bench, call: Callable[[], Any], *, capture: bool = False) -> float:
    return bench.time(call, capture=capture, calls=SWEEP_CALLS, samples=SWEEP_SAMPLES)


def _say(bench: Bench, name: str, call: Callable[[], Any]) -> None:
    bench.say(f"{name}: {_time(bench, call):.1f} us")


def low_latency_variants(buffer: Any, capacity: int, tokens: Tokens) -> dict[str, Callable[[], Any]]:
    """Dispatch and combine with tokens in fp8, and with results that were written where combine sends them from."""
    hidden, ids, weights = tokens
    experts = TIMED["num_experts"]

    def exchange(fp8: bool) -> Any:
        *_, handle, _, hook = buffer.low_latency_dispatch(
            x=hidden,
            topk_idx=ids,
            num_max_dispatch_tokens_per_rank=capacity,
            num_experts=experts,
            use_fp8=fp8,
            return_recv_hook=True,
        )
        hook()
        space = buffer.get_next_low_latency_combine_buffer(handle)
        combined, _, hook = buffer.low_latency_combine(
            # Only its shape is looked at: the rows are where the library gave space for them.
            x=space.new_empty(space.shape),
            topk_idx=ids,
            topk_weights=weights,
            handle=handle,
            zero_copy=True,
            return_recv_hook=True,
        )
        hook()
        return combined

    return {"bare, zero copy": lambda: exchange(False), "bare, fp8, zero copy": lambda: exchange(True)}
