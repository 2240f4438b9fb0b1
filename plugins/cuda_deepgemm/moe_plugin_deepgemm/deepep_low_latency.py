"""Low-latency mode of dispatcher `deepep`: few tokens into one block of rows per expert, and never a look at the host.

Combine multiplies by the router weights and adds up, in fp32. Sending and receiving are two launches on the current
stream; what lies between them overlaps with the tokens' way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from moe_core.errors import InputError
from moe_core.kernel_library import require_keywords
from moe_core.kernels.slots import EvenIds
from moe_core.payloads import CombineFn, DispatchFn, ExpertGroup, MaskedTokens, SendFn, Tensor
from moe_core.plan import MoEPlan, Route
from moe_plugin_deepgemm.deepep_buffers import BUFFERS, low_latency_geometry
from moe_plugin_deepgemm.deepep_nvfp4 import blocks_of
from moe_plugin_deepgemm.deepep_specs import DEEP_EP


@attrs.define(eq=False)
class Sent:
    """What one dispatch leaves for its combine.

    Attributes:
        handle: The library's.
        topk_ids: `[T, K]` int64, the library's ids of this rank's tokens.
        topk_weights: `[T, K]` fp32.
    """

    handle: Any
    topk_ids: Tensor
    topk_weights: Tensor


class LowLatencyExchange:
    """Sends tokens to the blocks of their experts, and their weighted sums back."""

    def __init__(self, plan: MoEPlan, route: Route, group: ExpertGroup, token_scale: Tensor | None = None) -> None:
        """Get the buffer, together with all ranks.

        Args:
            plan: The layer's plan.
            route: The route.
            group: This process's place among the ranks.
            token_scale: 0-dim fp32 by which the library multiplies tokens before it rounds them to NVFP4.

        Raises:
            InputError: The group has no process group, or the workload no bound on its tokens.
            PluginError: The library cannot be loaded, has other functions, or contradicts the environment.
        """
        request, token_dtype = plan.request, route.token_dtype
        self._ids = EvenIds(request, group.device)
        self._num_local_experts = len(request.local_slots(group.rank))
        self._num_missing = request.max_local_experts - self._num_local_experts
        geometry = low_latency_geometry(plan, route, self._ids.num_experts)
        self._capacity = geometry.capacity
        # Typical rows of an expert, for every number of tokens.
        rows_per_token = request.rows_per_token
        self._expected_rows = [max(1, round(count * rows_per_token)) for count in range(self._capacity + 1)]
        self._shared = BUFFERS.get(group.require_process_group("dispatcher deepep"), geometry)
        buffer, packed = self._shared.buffer, token_dtype.scales == "ue8m0_128"
        form = {"use_fp8": token_dtype.dtype == "fp8", "round_scale": packed, "use_ue8m0": packed}
        self._is_nvfp4 = token_scale is not None
        #: Builds without NVFP4 have none of these.
        nvfp4: dict[str, Any] = {"use_nvfp4": True, "x_global_scale": token_scale} if self._is_nvfp4 else {}
        sizes = {"num_max_dispatch_tokens_per_rank": self._capacity, "num_experts": self._ids.num_experts}
        # What stays is said once: in decoding, the host's time counts.
        same = {**sizes, **form, **nvfp4, "return_recv_hook": True}
        dispatch = require_keywords(buffer.low_latency_dispatch, "x", "topk_idx", *same, of=DEEP_EP)
        self._dispatch = partial(dispatch, **same)
        combine = require_keywords(
            buffer.low_latency_combine, "x", "topk_idx", "topk_weights", "handle", "return_recv_hook", of=DEEP_EP
        )
        self._combine = partial(combine, return_recv_hook=True)

    def dispatch(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[MaskedTokens, Sent]:
        """`[T, H]` of this rank -> blocks of rows `[L, M, H]` of its experts."""
        tokens, sent, wait = self._send(hidden_states, topk_ids, topk_weights)
        wait()
        return tokens, sent

    def send(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[Callable[[], MaskedTokens], Sent]:
        """The same, where tokens that arrive are waited for when they are asked for.

        Raises:
            InputError: More tokens than the buffer has places for; nothing was sent.
        """
        tokens, sent, wait = self._send(hidden_states, topk_ids, topk_weights)

        def receive() -> MaskedTokens:
            wait()
            return tokens

        return receive, sent

    def _send(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[MaskedTokens, Sent, Callable[[], None]]:
        """Where the tokens will be, what combine needs, and what waits for them."""
        num_tokens = hidden_states.shape[0]
        if num_tokens > self._capacity:
            raise InputError(f"{num_tokens} tokens on this rank, its buffer takes {self._capacity}; nothing was sent")
        ids = self._ids(topk_ids)
        received, counts, handle, _, wait = self._dispatch(x=hidden_states.contiguous(), topk_idx=ids)
        rows, scales = received if isinstance(received, tuple) else (received, None)
        if self._is_nvfp4:
            rows, scales = blocks_of(rows, scales)
        tokens = MaskedTokens(
            hidden_states=rows, masked_m=counts, expected_m=self._expected_rows[num_tokens], scales=scales
        )
        if self._num_missing:
            self._leave_out_missing(tokens)
        return tokens, Sent(handle, ids, topk_weights.float().contiguous()), wait

    def combine(self, rows: Tensor, sent: Sent) -> Tensor:
        """Unweighted rows `[L, M, H]` -> `[T, H]`."""
        blocks = self._with_missing(rows) if self._num_missing else rows.contiguous()
        combined, _, wait = self._combine(
            x=blocks, topk_idx=sent.topk_ids, topk_weights=sent.topk_weights, handle=sent.handle
        )
        wait()
        return combined  # type: ignore[no-any-return]

    def _leave_out_missing(self, tokens: MaskedTokens) -> None:
        """Only this rank's experts, without the ones that fill up a smaller share."""
        # Views; of all of them they would take the host some microseconds.
        own = slice(self._num_local_experts)
        tokens.hidden_states, tokens.masked_m = tokens.hidden_states[own], tokens.masked_m[own]
        if tokens.scales is not None:
            tokens.scales = tokens.scales[own]

    def _with_missing(self, rows: Tensor) -> Tensor:
        """Blocks also for the experts that fill up a smaller share; nothing reads what is in them."""
        whole = rows.new_empty((rows.shape[0] + self._num_missing, *rows.shape[1:]))
        whole[: rows.shape[0]] = rows
        return whole


def bind(
    plan: MoEPlan, route: Route, group: ExpertGroup, token_scale: Tensor | None = None
) -> tuple[DispatchFn, CombineFn, SendFn]:
    """Dispatch, combine and send of the low-latency mode; `token_scale` comes with tokens in NVFP4."""
    exchange = LowLatencyExchange(plan, route, group, token_scale)
    return exchange.dispatch, exchange.combine, exchange.send
