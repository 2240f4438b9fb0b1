"""Normal mode of dispatcher `deepep`: any number of tokens, whose counts the host waits for.

The library sends one row per (token, rank that owns one of its experts), with local ids and weights beside it. The rows
are grouped by expert here; afterwards a token's rows are weighted and added up here, and its ranks' sums by the
library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from moe_core.errors import InputError
from moe_core.kernel_library import require_keywords
from moe_core.kernels import ops
from moe_core.kernels.slots import EvenIds
from moe_core.payloads import TORCH_DTYPES, CombineFn, ContiguousTokens, DispatchFn, ExpertGroup, SendFn, Tensor
from moe_core.plan import MoEPlan, Route
from moe_core.specs import TokenDtype
from moe_plugin_deepgemm.deepep_buffers import BUFFERS, normal_configs, normal_geometry
from moe_plugin_deepgemm.deepep_specs import DEEP_EP

#: Rows, or rows and their scales.
_Rows: TypeAlias = Tensor | tuple[Tensor, Tensor]


@attrs.define(eq=False)
class Received:
    """What one dispatch leaves for its combine.

    Attributes:
        handle: The library's.
        topk_weights: `[R, K]` fp32 of the received rows.
        row_map: `[R, K]`, where the slots of each received row are among the grouped ones.
    """

    handle: Any
    topk_weights: Tensor
    row_map: Tensor | None = None


class NormalExchange:
    """Sends tokens to the ranks of their experts, and their sums back."""

    def __init__(self, plan: MoEPlan, route: Route, group: ExpertGroup) -> None:
        """Get the buffer, together with all ranks.

        Raises:
            InputError: The group has no process group.
            PluginError: The library cannot be loaded, or has other functions.
        """
        request, token_dtype = plan.request, route.token_dtype
        self._ids = EvenIds(request, group.device)
        self._num_local_experts = len(request.local_slots(group.rank))
        self._dtype, self._alignment = TORCH_DTYPES[request.dtype], route.row_alignment
        self._column_major = token_dtype.scales in ("column_128", "ue8m0_128")
        # Rows of scales travel; columns are made of them while the tokens are grouped.
        as_rows = TokenDtype("fp8", "row_128") if token_dtype.scales == "column_128" else token_dtype
        self._wire = None if token_dtype.dtype in TORCH_DTYPES else as_rows
        self._shared = BUFFERS.get(group.require_process_group("dispatcher deepep"), normal_geometry(plan))
        buffer = self._shared.buffer
        self._layout = require_keywords(buffer.get_dispatch_layout, "topk_idx", "num_experts", of=DEEP_EP)
        self._dispatch = require_keywords(
            buffer.dispatch,
            "x",
            "num_tokens_per_rank",
            "num_tokens_per_rdma_rank",
            "is_token_in_rank",
            "num_tokens_per_expert",
            "topk_idx",
            "topk_weights",
            "expert_alignment",
            "config",
            "async_finish",
            of=DEEP_EP,
        )
        self._combine = require_keywords(buffer.combine, "x", "handle", "config", of=DEEP_EP)
        self._dispatch_config, self._combine_config = normal_configs(group.size)

    def dispatch(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[ContiguousTokens, Received]:
        """`[T, H]` of this rank -> the rows `[R, H]` of its experts."""
        receive, received = self._send(hidden_states, topk_ids, topk_weights, async_finish=False)
        return receive(), received

    def send(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[Callable[[], ContiguousTokens], Received]:
        """The same, where the tokens travel on the library's stream until they are asked for."""
        return self._send(hidden_states, topk_ids, topk_weights, async_finish=True)

    def _send(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, async_finish: bool
    ) -> tuple[Callable[[], ContiguousTokens], Received]:
        ids = self._ids(topk_ids)
        per_rank, per_host, per_expert, is_in_rank, _ = self._layout(topk_idx=ids, num_experts=self._ids.num_experts)
        tokens = hidden_states.contiguous()
        rows, local_ids, weights, counts, handle, event = self._dispatch(
            x=tokens if self._wire is None else ops.quantize(tokens, self._wire),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=topk_weights.float().contiguous(),
            expert_alignment=self._alignment,
            config=self._dispatch_config,
            async_finish=async_finish,
        )
        received = Received(handle, weights)

        def receive() -> ContiguousTokens:
            if async_finish:
                event.current_stream_wait()
            grouped, received.row_map = self._grouped(rows, local_ids, sum(counts))
            return grouped

        return receive, received

    def _grouped(self, received: _Rows, local_ids: Tensor, num_rows: int) -> tuple[ContiguousTokens, Tensor]:
        rows, scales = received if isinstance(received, tuple) else (received, None)
        return ops.permute_contiguous(
            rows,
            local_ids,
            self._num_local_experts,
            alignment=self._alignment,
            scales=scales,
            column_major=self._column_major,
            num_rows=num_rows,
        )

    def combine(self, rows: Tensor, received: Received) -> Tensor:
        """Unweighted rows `[R, H]` -> `[T, H]`: summed in fp32 and rounded on each rank, and again over the ranks."""
        if received.row_map is None:
            raise InputError("combine was called before the tokens of its dispatch were received")
        sums = ops.combine(rows, received.row_map, received.topk_weights, self._dtype)
        return self._combine(x=sums, handle=received.handle, config=self._combine_config)[0]  # type: ignore[no-any-return]


def bind(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn, SendFn]:
    """Dispatch, combine and send of the normal mode."""
    exchange = NormalExchange(plan, route, group)
    return exchange.dispatch, exchange.combine, exchange.send
