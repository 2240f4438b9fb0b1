"""The launches of one rank."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from moe_core.kernels.triton.launch import Launches, divided_up, looked_at, power_of_two
from moe_core.kernels.triton.peer import kernels
from moe_core.kernels.triton.peer.buffer import PeerBuffer
from moe_core.payloads import Tensor

#: Bytes of a row that a program moves at a time, and programs per multiprocessor that share the rows of a launch.
_CHUNK_BYTES, _RESIDENT = 4096, 4
#: Choices (an id and a weight each) that a program receives.
_BLOCK = 1024
#: Compile-time arguments of each kernel, beside those that all have, in the order in which it names them.
_CONSTANTS = {
    kernels.send_tokens: ("IDS_AT", "WEIGHTS_AT", "WIDTH", "CHUNK"),
    kernels.receive_ids: ("IDS_AT", "WEIGHTS_AT", "BLOCK"),
    kernels.return_sums: ("SUMS_AT", "PIECES", "WIDTH", "CHUNK"),
    kernels.add_sums: ("SUMS_AT", "PIECES", "WIDTH", "CHUNK"),
}


class PeerExchange:
    """Sends tokens, and brings sums of them back; see the package for what callers have to keep.

    Attributes:
        tokens: `[size * capacity, H]` in the layout's dtype: those of all ranks, defined where a choice is here.
        ids: `[size * capacity, K]` int32, their local expert ids, -1 where no token or no expert of this rank is.
        weights: `[size * capacity, K]` fp32, their router weights.
    """

    def __init__(self, buffer: PeerBuffer, first_slots: Tensor, multiprocessors: int, pdl: bool) -> None:
        """What does not change between calls.

        Args:
            buffer: Of all ranks.
            first_slots: `[size + 1]` int32, the first slot of each rank, and the number of slots.
            multiprocessors: Of the device.
            pdl: Whether a launch may start before the one in front of it has ended.
        """
        self._buffer, layout = buffer, buffer.layout
        self._layout = layout
        self.tokens, self.ids, self.weights = buffer.tokens, buffer.ids, buffer.weights
        self._counts, self._first_slots = buffer.counts, first_slots
        self._chunk = min(_CHUNK_BYTES // layout.torch_dtype.itemsize, power_of_two(layout.hidden_size))
        self._num_chunks = divided_up(layout.hidden_size, self._chunk)
        self._most_programs = _RESIDENT * multiprocessors
        self._receivers = layout.size * divided_up(layout.capacity * layout.top_k, _BLOCK)
        self._send, self._receive, self._return, self._add = (
            _Launch(kernel, buffer, self._constants(buffer.rank, names, pdl), pdl)
            for kernel, names in _CONSTANTS.items()
        )

    def send(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        """Write tokens to the ranks that own their slots; an id out of range stops the device.

        Args:
            hidden_states: `[T, H]` in the layout's dtype, `T <= capacity`, unit stride along H.
            topk_ids: `[T, K]` int32 or int64 slots, -1 = none.
            topk_weights: `[T, K]` of any float dtype; fp32 travels.

        Raises:
            PluginError: The forward before was left midway; nothing was sent.
        """
        self._buffer.begin()
        num_tokens = hidden_states.shape[0]
        strides = hidden_states.stride(0), *topk_ids.stride(), *topk_weights.stride()
        key = looked_at(hidden_states, topk_ids, topk_weights), strides
        arguments = hidden_states, topk_ids, topk_weights, self._first_slots, num_tokens, *strides
        self._send(key, self._programs(num_tokens), arguments)

    def receive(self) -> None:
        """Wait for the tokens of all ranks, and fill `ids` and `weights`."""
        self._receive(None, self._receivers, (self.ids, self.weights, self._counts))

    def bring_back(self, sums: Tensor, topk_ids: Tensor) -> Tensor:
        """Return sums to the ranks of their tokens, wait for those of this rank's, and add them up.

        Args:
            sums: `[size * capacity, H]` in the layout's dtype, contiguous; read where a choice of the token is here.
            topk_ids: As they were sent.

        Returns:
            `[T, H]`, added up in fp32 in the order of ranks; zeros for a token without expert.
        """
        num_tokens, strides = topk_ids.shape[0], topk_ids.stride()
        # Before the launches: nothing that runs when the last of them begins may still use this memory.
        out = torch.empty((num_tokens, self._layout.hidden_size), dtype=sums.dtype, device=sums.device)
        # Other ranks may have other numbers of tokens; this one only says how many programs share them.
        programs, key = self._programs(num_tokens), looked_at(sums, topk_ids)
        self._return(key, programs, (sums, self.ids, self._counts))
        self._add((key, strides), programs, (sums, topk_ids, out, self._first_slots, num_tokens, *strides))
        self._buffer.end()
        return out

    def _programs(self, num_rows: int) -> int:
        """One at least: without rows there is a number to raise, or to wait for."""
        return max(1, min(num_rows * self._num_chunks, self._most_programs))

    def _constants(self, rank: int, names: tuple[str, ...], pdl: bool) -> dict[str, Any]:
        layout = self._layout
        some = {
            "IDS_AT": layout.ids_at,
            "WEIGHTS_AT": layout.weights_at,
            "SUMS_AT": layout.sums_at,
            "PIECES": layout.pieces,
            "WIDTH": layout.hidden_size,
            "CHUNK": self._chunk,
            "BLOCK": _BLOCK,
        }
        return {
            "RANK": rank,
            "SIZE": layout.size,
            "CAPACITY": layout.capacity,
            "TOP_K": layout.top_k,
            "NUMBERS_AT": layout.numbers_at,
            "PDL": pdl,
            **{name: some[name] for name in names},
        }


class _Launch:
    """Launches of one kernel."""

    def __init__(self, kernel: Any, buffer: PeerBuffer, constants: dict[str, Any], pdl: bool) -> None:
        self._launches, self._buffer = Launches(kernel), (buffer.own, buffer.offsets, buffer.state)
        # `debug` makes assertions real; it would make additions checked ones too.
        options = {"num_warps": 4, "launch_pdl": pdl, "debug": True, "sanitize_overflow": False}
        self._variant = lambda: (constants, options)

    def __call__(self, key: Hashable, programs: int, arguments: tuple[Any, ...]) -> None:
        self._launches(key, (programs, 1, 1), (*self._buffer, *arguments), self._variant)
