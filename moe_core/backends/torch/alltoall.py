"""Dispatcher `torch_alltoall`: expert parallelism over any transport of torch.distributed.

One row per (token, rank that owns one of its experts) travels, with its local ids and weights beside it in the same
message; the receiving rank adds up its experts, and one row per message travels back. Messages are bytes, so no
transport needs to know a dtype. The counts are read on the host once per forward: this dispatcher is not graph-safe.
"""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist

from moe_core.backends.torch.local import local_permutation
from moe_core.backends.torch.received import bind_permuted
from moe_core.kernels.checks import checked_slots
from moe_core.kernels.ops import combine
from moe_core.kernels.wire import decode_message, encode_message
from moe_core.payloads import TORCH_DTYPES, CombineFn, DispatchFn, ExpertGroup, StandardTokens, Tensor
from moe_core.plan import MoEPlan, Route


@attrs.define(eq=False)
class Exchange:
    """What one dispatch leaves for its combine.

    Attributes:
        row_map: `[T, W]` int64, the row that this rank sent to each rank for each token, -1 for none.
        sent: Rows sent to each rank.
        received: Rows received from each rank.
    """

    row_map: Tensor
    sent: list[int]
    received: list[int]


class AllToAll:
    """Sends tokens to the ranks of their experts, and their sums back."""

    def __init__(self, plan: MoEPlan, route: Route, group: ExpertGroup) -> None:
        """Build the owner tables.

        Raises:
            InputError: The group has no process group to send through.
        """
        request = plan.request
        self._group, self._size = group.require_process_group("dispatcher torch_alltoall"), group.size
        self._num_slots, self._top_k, self._hidden = request.num_slots, request.top_k, request.hidden_size
        self._token_dtype, self._dtype = route.token_dtype, TORCH_DTYPES[request.dtype]
        shares = [len(request.local_slots(rank)) for rank in range(group.size)]
        # Of evenly spread ids, this share of all ranks' tokens is received; without slots nothing is.
        received_share = 1 - (1 - max(1, shares[group.rank]) / request.num_slots) ** request.top_k
        self._rows_per_received = request.top_k / request.num_slots / received_share
        owner = [rank for rank, share in enumerate(shares) for _ in range(share)]
        local = [index for share in shares for index in range(share)]
        self._owner = torch.tensor(owner, dtype=torch.int64, device=group.device)
        self._local = torch.tensor(local, dtype=torch.int32, device=group.device)

    def dispatch(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[StandardTokens, Exchange]:
        """`[T, H]` of this rank -> the rows `[R, H]` that need this rank's experts, with local ids `[R, K]`."""
        topk_ids, topk_weights = checked_slots(topk_ids, topk_weights, self._num_slots)
        safe = topk_ids.long().clamp(min=0)
        owner = torch.where(topk_ids < 0, -1, self._owner[safe])
        wanted = (owner[:, None, :] == torch.arange(self._size, device=owner.device)[:, None]).any(-1)
        # Rows in the order of their destination, tokens in order inside it.
        rank, token = wanted.mT.nonzero(as_tuple=True)
        exchange = self._exchange_counts(wanted, rank, token)
        ids = torch.where(owner[token] == rank[:, None], self._local[safe[token]], -1)
        message = encode_message(hidden_states[token], ids, topk_weights[token], self._token_dtype)
        received = self._send(message, exchange.sent, exchange.received)
        tokens = decode_message(received, self._hidden, self._top_k, self._token_dtype)
        tokens.expected_m = max(1, round(received.shape[0] * self._rows_per_received))
        return tokens, exchange

    def combine(self, rows: Tensor, exchange: Exchange) -> Tensor:
        """Sums `[R, H]` of received rows -> `[T, H]` of this rank's own tokens, added up in fp32."""
        message = rows.to(self._dtype).contiguous().view(torch.uint8)
        returned = self._send(message, exchange.received, exchange.sent)
        return combine(returned.view(self._dtype), exchange.row_map, None, self._dtype)

    def _exchange_counts(self, wanted: Tensor, rank: Tensor, token: Tensor) -> Exchange:
        sent = wanted.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        row_map = torch.full(wanted.shape, -1, dtype=torch.int64, device=wanted.device)
        row_map[token, rank] = torch.arange(token.numel(), device=wanted.device)
        return Exchange(row_map, sent.tolist(), received.tolist())

    def _send(self, message: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Bytes `[rows, B]` to every rank and from every rank."""
        result = message.new_empty((sum(received), message.shape[1]))
        dist.all_to_all_single(result, message, received, sent, group=self._group)
        return result


def bind_standard(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn]:
    """Received rows as tokens with local ids; the runner weights and sums them."""
    exchange = AllToAll(plan, route, group)
    return exchange.dispatch, exchange.combine


def bind_contiguous(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn]:
    """Received rows grouped by local expert."""
    return bind_permuted(plan, AllToAll(plan, route, group), local_permutation(plan, route, group).contiguous)


def bind_masked(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn]:
    """Received rows in a block per local expert."""
    return bind_permuted(plan, AllToAll(plan, route, group), local_permutation(plan, route, group).masked)
