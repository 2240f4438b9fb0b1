"""DeepEP without GPUs, to try the benchmark out: the library of the plugin's tests, and calls that only this makes.

Those need the vendor's Python (`make deepgemm-vendor`), which checks arguments and calls what is here.
"""

from __future__ import annotations

from typing import Any

import deepep_layers
import emulated_deep_ep
import torch
from emulated_deep_ep import Config, EventHandle, Runtime

Tensor = torch.Tensor
_dispatch, _combine = Runtime.intranode_dispatch, Runtime.low_latency_combine
#: Of what dispatch returns: rows, ids, weights and sources, as long as what was received; and the experts' counts.
_BY_ROW, _COUNTS = (0, 2, 3, 8), 4
#: Where rows are sent from, by shape.
_space: dict[tuple[int, ...], Tensor] = {}


def _intranode_dispatch(
    runtime: Runtime,
    x: Tensor,
    x_scales: Tensor | None,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    per_rank: Tensor | None,
    in_rank: Tensor,
    per_expert: Tensor | None,
    cached_rows: int,
    cached_ranks: Tensor | None,
    cached_channels: Tensor | None,
    alignment: int,
    num_worst_tokens: int,
    config: Config,
    *rest: Any,
) -> tuple[Any, ...]:
    """Also again with the handle of a former one, and with room for the most rows, which the host does not count."""
    if cached_channels is not None:
        return _dispatch_again(runtime, x, in_rank, cached_rows, cached_channels, config)
    # No rows, ranks and channels of a former call, and no room for the most rows.
    plain = (topk_idx, topk_weights, per_rank, in_rank, per_expert, 0, None, None, alignment, 0, config, *rest)
    found = list(_dispatch(runtime, x, x_scales, *plain))  # type: ignore[arg-type]
    if num_worst_tokens:
        for index in _BY_ROW:
            short = found[index]
            found[index] = short.new_zeros((num_worst_tokens, *short.shape[1:]))
            found[index][: len(short)] = short
        found[_COUNTS] = []
    return tuple(found)


def _dispatch_again(
    runtime: Runtime, x: Tensor, in_rank: Tensor, num_rows: int, channels: Tensor, config: Config
) -> tuple[Any, ...]:
    num_channels = config.channels(2 * x.shape[1], runtime.num_ranks, runtime.num_nvl_bytes)
    emulated_deep_ep._require(channels.shape == (runtime.num_ranks, num_channels), "the channels of the handle")
    shown = emulated_deep_ep._every_rank((x, in_rank))
    # In the order in which the emulated dispatch receives them.
    rows = torch.cat([tokens[wanted[:, runtime.rank].nonzero().flatten().flip(0)] for tokens, wanted in shown])
    emulated_deep_ep._require(len(rows) == num_rows, "the rows of the handle")
    return (rows, *[None] * 9, EventHandle())


def _low_latency_combine(runtime: Runtime, x: Tensor, *arguments: Any) -> tuple[Any, ...]:
    """Also of rows that lie where they are sent from."""
    *first, zero_copy, is_async, hook, out = arguments
    rows = _space[tuple(x.shape)] if zero_copy else x
    return _combine(runtime, rows, *first, False, is_async, hook, out)


def _next_buffer(runtime: Runtime, capacity: int, hidden: int, num_experts: int) -> Tensor:
    shape = num_experts // runtime.num_ranks, runtime.num_ranks * capacity, hidden
    return _space.setdefault(shape, torch.zeros(shape, dtype=torch.bfloat16))


def install() -> None:
    """Both libraries, emulated in this process, with the further calls."""
    Runtime.intranode_dispatch = _intranode_dispatch  # type: ignore[assignment, method-assign]
    Runtime.low_latency_combine = _low_latency_combine  # type: ignore[assignment, method-assign]
    Runtime.get_next_low_latency_combine_buffer = _next_buffer  # type: ignore[attr-defined]
    deepep_layers.install()
