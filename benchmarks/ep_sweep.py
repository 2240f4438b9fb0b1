"""The normal mode of DeepEP under other settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from ep_bare import Normal
from ep_contenders import DEEP_EP
from ep_ranks import DEVICE, MANY_TOKENS, SWEEP_CALLS, SWEEP_SAMPLES, Bench

from moe_core.tuning.timing import synchronize

#: Multiprocessors; tokens of a chunk that dispatch sends, and that combine sends; and of one that is received.
SMS, SENT, SENT_BACK, RECEIVED = (20, 32, 48, 64, 96, 128), (8, 16, 24, 32), (4, 8, 10, 16), (256, 512)


def sweep_normal(bench: Bench) -> None:
    """Dispatch and combine apart under all settings, and both with those of the smallest sum."""
    from deep_ep import Buffer, Config

    largest = Config(max(SMS), max(SENT), max(RECEIVED))
    request = bench.timed(DEEP_EP)
    num_bytes = largest.get_nvl_buffer_size_hint(2 * request.hidden_size, bench.group.size)
    buffer = Buffer(group=bench.group.process_group, num_nvl_bytes=num_bytes, explicitly_destroy=True)
    for count in reversed(MANY_TOKENS):
        normal = Normal(buffer, request.num_experts, bench.routed(count), (largest, largest))
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


def _time(bench: Bench, call: Callable[[], Any]) -> float:
    return bench.time(call, capture=False, calls=SWEEP_CALLS, samples=SWEEP_SAMPLES)


def _say(bench: Bench, name: str, call: Callable[[], Any]) -> None:
    bench.say(f"{name}: {_time(bench, call):.1f} us")
