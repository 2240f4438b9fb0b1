"""Dispatcher `peer_memory`: expert parallelism between the GPUs of one host that write into each other's memory.

A token goes once to each rank that has any of its experts, as it is; sums come back the same way and are added up in
fp32 on the token's rank. The host waits for nothing. Tokens have places that do not depend on their number, so that the
experts get `size * max_tokens` tokens, of which those that nobody sent have no slot.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from moe_core.backends.torch.local import local_permutation
from moe_core.backends.torch.received import bind_permuted
from moe_core.backends.triton.device import device_of
from moe_core.errors import InputError, PluginError
from moe_core.kernels.checks import check_id_dtype, check_ids
from moe_core.kernels.on_device import on_device
from moe_core.kernels.triton.peer.buffer import PeerBuffer, make_peer_buffer
from moe_core.kernels.triton.peer.exchange import PeerExchange
from moe_core.kernels.triton.peer.layout import PeerLayout
from moe_core.payloads import CombineFn, DispatchFn, ExpertGroup, SendFn, StandardTokens, Tensor
from moe_core.plan import MoEPlan, Route
from moe_core.rank_buffers import BufferRegistry

#: The buffers of this process, which layers of one geometry share. Before a group is destroyed, and after the layers
#: that used it are gone, `BUFFERS.free_unused(process_group)` on all ranks gives their memory back.
BUFFERS: BufferRegistry[PeerLayout] = BufferRegistry(make_peer_buffer, lambda buffer: buffer.free())


@attrs.frozen(eq=False)
class Sent:
    """What one dispatch leaves for its combine.

    Attributes:
        topk_ids: `[T, K]`, the slots of this rank's tokens.
        inputs: Tokens and weights, which must not go while they are being sent.
    """

    topk_ids: Tensor
    inputs: tuple[Tensor, Tensor]


class PeerMemory:
    """Sends tokens to the ranks of their experts, and brings sums back."""

    def __init__(self, plan: MoEPlan, route: Route, group: ExpertGroup) -> None:
        """Share buffers with the other ranks, which do the same.

        Raises:
            InputError: No process group, or no bound on a rank's tokens.
            PluginError: The ranks cannot reach each other's memory.
        """
        request, device = plan.request, group.device or torch.device("cpu")
        process_group = group.require_process_group("dispatcher peer_memory")
        if route.max_tokens is None:
            raise InputError("peer_memory needs a bound on the tokens of a rank; declare Workload(max_tokens=...)")
        layout = PeerLayout(
            device_type=device.type,
            size=group.size,
            capacity=route.max_tokens,
            hidden_size=request.hidden_size,
            top_k=request.top_k,
            dtype=request.dtype,
        )
        with on_device(device):
            self._shared = BUFFERS.get(process_group, layout)
        buffer: PeerBuffer = self._shared.buffer
        if buffer.own.device != device:
            raise PluginError(
                f"dispatcher peer_memory: this rank's buffer is on {buffer.own.device}, the layer on {device}; a "
                "process group serves the layers of one device per rank"
            )
        shares = [request.local_slots(rank) for rank in range(group.size)]
        first_slots = [share.start for share in shares] + [request.num_slots]
        facts = device_of(device)
        self._exchange = PeerExchange(
            buffer, torch.tensor(first_slots, dtype=torch.int32, device=device), facts.multiprocessors, facts.pdl
        )
        self._device, self._capacity, self._num_slots = device, layout.capacity, request.num_slots
        self._rows_per_token = request.rows_per_token

    def dispatch(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[StandardTokens, Sent]:
        """`[T, H]` of this rank -> tokens of all ranks `[size * max_tokens, H]` with local ids."""
        receive, sent = self.send(hidden_states, topk_ids, topk_weights)
        return receive(), sent

    def send(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[Callable[[], StandardTokens], Sent]:
        """The same, where tokens that arrive are waited for when they are asked for.

        Raises:
            InputError: More tokens than the buffer has places for, or (on CPU) an id out of range; nothing was sent.
        """
        num_tokens = hidden_states.shape[0]
        if num_tokens > self._capacity:
            raise InputError(f"{num_tokens} tokens on this rank, its buffer takes {self._capacity}; nothing was sent")
        if self._device.type == "cpu":
            check_ids(topk_ids, self._num_slots)
        else:
            # Whether they are in range is looked at by who reads them anyway.
            check_id_dtype(topk_ids)
        rows = hidden_states if hidden_states.stride(1) == 1 else hidden_states.contiguous()
        with on_device(self._device):
            self._exchange.send(rows, topk_ids, topk_weights)

        def receive() -> StandardTokens:
            with on_device(self._device):
                self._exchange.receive()
            return StandardTokens(
                hidden_states=self._exchange.tokens,
                topk_ids=self._exchange.ids,
                topk_weights=self._exchange.weights,
                expected_m=max(1, round(num_tokens * self._rows_per_token)),
            )

        return receive, Sent(topk_ids, (rows, topk_weights))

    def combine(self, sums: Tensor, sent: Sent) -> Tensor:
        """Sums `[size * max_tokens, H]` of tokens of all ranks -> `[T, H]` of this rank's."""
        with on_device(self._device):
            return self._exchange.bring_back(sums.contiguous(), sent.topk_ids)


def bind_standard(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn, SendFn]:
    """Received tokens with local ids; the runner weights and sums them."""
    exchange = PeerMemory(plan, route, group)
    return exchange.dispatch, exchange.combine, exchange.send


def bind_contiguous(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn]:
    """Received tokens grouped by local expert."""
    return bind_permuted(plan, PeerMemory(plan, route, group), local_permutation(plan, route, group).contiguous)


def bind_masked(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[DispatchFn, CombineFn]:
    """Received tokens in a block per local expert."""
    return bind_permuted(plan, PeerMemory(plan, route, group), local_permutation(plan, route, group).masked)
