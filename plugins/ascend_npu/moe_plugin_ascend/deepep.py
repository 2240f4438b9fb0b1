"""Dispatcher `deepep`: expert parallelism through Ascend's DeepEP, in its normal and its low-latency mode.

Both deliver one row per (token, local expert), grouped by expert. The experts give unweighted rows back; combine
multiplies them by the router weights and adds them up.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import attrs
import torch

from moe_core.errors import PluginError
from moe_core.kernel_library import require_keywords
from moe_core.payloads import CombineFn, ContiguousTokens, DispatchFn, ExpertGroup, Tensor
from moe_core.plan import MoEPlan, Route
from moe_plugin_ascend import variables
from moe_plugin_ascend.deepep_buffers import BUFFERS, NORMAL, Geometry, low_latency_geometry
from moe_plugin_ascend.deepep_specs import DEEP_EP, crosses_hosts
from moe_plugin_ascend.environment_lock import ENVIRONMENT
from moe_plugin_ascend.expert_ids import LibraryIds, at_least_one

#: Element type of the tokens that arrive for each dispatch dtype.
_ARRIVES = {"bf16": torch.bfloat16, "int8": torch.int8}
#: Rows, or rows and their scales.
_Received: TypeAlias = Tensor | tuple[Tensor, Tensor]


@attrs.define(eq=False)
class Sent:
    """What one dispatch leaves for its combine.

    Attributes:
        handle: The library's.
        topk_ids: `[T, K]` int64, the library's ids of this rank's tokens.
        topk_weights: `[T, K]` fp32.
        num_tokens: T without the token that stands for none.
    """

    handle: Any
    topk_ids: Tensor
    topk_weights: Tensor
    num_tokens: int


class _Exchange:
    """What the modes have in common: the buffer, the ids, and the form of what arrives."""

    def __init__(self, plan: MoEPlan, route: Route, group: ExpertGroup, ids: LibraryIds, geometry: Geometry) -> None:
        # The buffer goes when nobody holds this any more.
        user = route.dispatcher or route.runner
        self._shared = BUFFERS.get(group.require_process_group(user.full_name), geometry)
        self._ids = ids
        self._num_local_experts = len(plan.request.local_slots(group.rank))
        self._dtype = route.token_dtype.dtype

    def _tokens(self, received: _Received, counts: Tensor) -> ContiguousTokens:
        """What arrived, with the counts of this rank's own experts, `[L]` of any integer type."""
        rows, scales = received if isinstance(received, tuple) else (received, None)
        if rows.dtype != _ARRIVES[self._dtype]:
            raise PluginError(f"deep_ep sent {rows.dtype} tokens, this route asked for {self._dtype}: see its settings")
        counts = counts[: self._num_local_experts].int()
        return ContiguousTokens(
            hidden_states=rows,
            num_tokens_per_expert=counts,
            group_ends=counts.cumsum(0, dtype=torch.int32),
            scales=scales,
        )


class NormalExchange(_Exchange):
    """Normal mode: any number of tokens, counts on the host."""

    def __init__(self, plan: MoEPlan, route: Route, group: ExpertGroup) -> None:
        """Get the buffer, and find out how this version of the library is told the dtype.

        Raises:
            InputError: The group has no process group.
            PluginError: The library cannot be loaded or has other functions.
        """
        super().__init__(plan, route, group, LibraryIds(plan.request, group.device), NORMAL)
        buffer = self._shared.buffer
        takes_dtype = "quant_mode" in inspect.signature(buffer.dispatch).parameters
        self._arguments = {"quant_mode": self._dtype} if takes_dtype else {}
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
            *self._arguments,
            of=DEEP_EP,
        )
        self._combine = require_keywords(buffer.combine, "x", "handle", of=DEEP_EP)
        # Across hosts the library drops the argument.
        self._needs_variable = not takes_dtype or crosses_hosts(route)

    def dispatch(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[ContiguousTokens, Sent]:
        """`[T, H]` of this rank -> the rows `[R, H]` for its experts."""
        x, ids, weights = at_least_one(hidden_states, *self._ids(topk_ids, topk_weights))
        per_rank, per_host, per_expert, is_in_rank, _ = self._layout(topk_idx=ids, num_experts=self._ids.num_experts)
        with self._environment():
            received, _, _, counts, handle, _ = self._dispatch(
                x=x,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_host,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=weights,
                **self._arguments,
            )
        on_device = torch.tensor(counts, dtype=torch.int32, device=x.device)
        return self._tokens(received, on_device), Sent(handle, ids, weights, hidden_states.shape[0])

    def combine(self, rows: Tensor, sent: Sent) -> Tensor:
        """Unweighted rows `[R, H]` -> `[T, H]`; the handle brings the weights of the dispatch."""
        combined, _, _ = self._combine(x=rows.contiguous(), handle=sent.handle)
        return combined[: sent.num_tokens]  # type: ignore[no-any-return]

    def _environment(self) -> AbstractContextManager[None]:
        if not self._needs_variable:
            return nullcontext()
        return ENVIRONMENT.holding(variables.INT8, str(int(self._dtype == "int8")))


class LowLatencyExchange(_Exchange):
    """Low-latency mode: a bounded number of tokens in buffers of one shape, counts on the device."""

    def __init__(self, plan: MoEPlan, route: Route, group: ExpertGroup) -> None:
        """Get the buffer; errors as `NormalExchange`."""
        ids = LibraryIds(plan.request, group.device)
        geometry = low_latency_geometry(plan, route, ids.num_experts)
        super().__init__(plan, route, group, ids, geometry)
        buffer, self._capacity = self._shared.buffer, geometry.capacity
        known = inspect.signature(buffer.low_latency_dispatch).parameters
        is_int8 = self._dtype == "int8"
        # What the library calls fp8 here is int8 on these machines.
        self._arguments = {"use_fp8": is_int8, **({"quant_mode": "int8"} if is_int8 and "quant_mode" in known else {})}
        self._takes_weights = "topk_weights" in known
        self._dispatch = require_keywords(
            buffer.low_latency_dispatch,
            "x",
            "topk_idx",
            "num_max_dispatch_tokens_per_rank",
            "num_experts",
            *self._arguments,
            of=DEEP_EP,
        )
        self._combine = require_keywords(
            buffer.low_latency_combine, "x", "topk_idx", "topk_weights", "handle", of=DEEP_EP
        )

    def dispatch(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[ContiguousTokens, Sent]:
        """`[T, H]` of this rank -> as many rows `[R, H]` as may arrive; those past the counts are undefined."""
        x, ids, weights = at_least_one(hidden_states, *self._ids(topk_ids, topk_weights))
        more = {"topk_weights": weights} if self._takes_weights else {}
        with ENVIRONMENT.holding(variables.SKIP, "1"):
            received, counts, handle, _, _ = self._dispatch(
                x=x,
                topk_idx=ids,
                num_max_dispatch_tokens_per_rank=self._capacity,
                num_experts=self._ids.num_experts,
                **self._arguments,
                **more,
            )
        return self._tokens(received, counts), Sent(handle, ids, weights, hidden_states.shape[0])

    def combine(self, rows: Tensor, sent: Sent) -> Tensor:
        """Unweighted rows `[R, H]` -> `[T, H]`."""
        with ENVIRONMENT.holding(variables.SKIP, "1"):
            combined, _, _ = self._combine(
                x=rows.contiguous(), topk_idx=sent.topk_ids, topk_weights=sent.topk_weights, handle=sent.handle
            )
        return combined[: sent.num_tokens]  # type: ignore[no-any-return]


def bind_normal(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn]:
    """Dispatch and combine of the normal mode."""
    exchange = NormalExchange(plan, route, group)
    return exchange.dispatch, exchange.combine


def bind_low_latency(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn]:
    """Dispatch and combine of the low-latency mode."""
    exchange = LowLatencyExchange(plan, route, group)
    return exchange.dispatch, exchange.combine
