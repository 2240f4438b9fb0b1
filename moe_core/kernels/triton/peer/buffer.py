"""A buffer per rank that all ranks of one host read and write as their own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import attrs
import torch
import torch.distributed as dist

from moe_core.errors import PluginError, in_a_line
from moe_core.kernels.on_device import on_device
from moe_core.kernels.triton.peer import kernels
from moe_core.kernels.triton.peer.layout import PeerLayout
from moe_core.kernels.triton.peer.memory import SharedMemory, shared_memory
from moe_core.payloads import Tensor
from moe_core.rank_buffers import check_one_host, every_rank

_Result = TypeVar("_Result")
_INSTEAD = "pin a2a_backend='torch_alltoall'"


@attrs.define(eq=False, kw_only=True)
class PeerBuffer:
    """The buffers of all ranks of a group, as this one sees them.

    Attributes:
        layout: Of each of them.
        rank: This one.
        own: uint8 `[num_bytes]`, this rank's.
        offsets: `[size]` int64, bytes from `own` to each rank's buffer in this process's addresses.
        state: `[state_words]` int32: forwards sent, received, returned and added up, then how many programs are done
            of the first, second and last of these, and of each piece that is returned.
        counts: `[size]` int32, tokens of each rank in this forward.
        ids: `[size * capacity, K]` int32, their local expert ids.
        weights: `[size * capacity, K]` fp32, their router weights.
        memory: What holds all of it.
        process_group: The ranks.
        is_open: Whether a forward has begun, or its capture, and not brought its sums back.
    """

    layout: PeerLayout
    rank: int
    own: Tensor
    offsets: Tensor
    state: Tensor
    counts: Tensor
    ids: Tensor
    weights: Tensor
    memory: SharedMemory
    process_group: dist.ProcessGroup
    is_open: bool = False

    @property
    def tokens(self) -> Tensor:
        """`[size * capacity, H]`, those that came to this rank."""
        rows = self.own[: self.layout.bytes_of_rows].view(self.layout.torch_dtype)
        return rows.view(self.layout.places, self.layout.hidden_size)

    def begin(self) -> None:
        """A forward begins: the next one may only after `end`.

        Raises:
            PluginError: The one before was left midway. Other ranks count it, so that this one's sums would be those
                of other tokens. Or perhaps it was, and this is a capture, which cannot look.
        """
        if self.is_open:
            self._check_left()
        self.is_open = True

    def end(self) -> None:
        """This forward has all its launches."""
        self.is_open = False

    def _check_left(self) -> None:
        """A capture that failed has sent nothing, which is no harm. Waits for the device."""
        if self.own.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise PluginError(
                "dispatcher peer_memory: a forward of this rank, or its capture, did not come to its end, and a "
                "capture cannot find out which; run a forward on all ranks before the next capture"
            )
        sent, _, _, added_up = self.state[:4].tolist()
        if sent != added_up:
            raise PluginError(
                "dispatcher peer_memory: a forward of this rank was left between dispatch and combine (it raised an "
                "error, or another one began meanwhile), so that the ranks no longer agree which forward is which; "
                "end the processes of all ranks, or drop their layers and call BUFFERS.free_unused on all of them"
            )

    def free(self) -> None:
        """Give the memory back; a collective."""
        device = self.own.device
        # In the context in which memory was made and opened, whichever is current for who frees it.
        with on_device(device):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            _release(self.process_group, self.memory)


def make_peer_buffer(process_group: dist.ProcessGroup, layout: PeerLayout) -> PeerBuffer:
    """Make the buffers of all ranks, on the current device, and try them out; a collective.

    Raises:
        PluginError: On every rank, where one of them cannot reach the memory of another.
    """
    check_one_host(process_group, "peer_memory")
    is_cpu = layout.device_type == "cpu"
    device = torch.device("cpu") if is_cpu else torch.device(layout.device_type, torch.cuda.current_device())
    memory, fault = _attempt(lambda: shared_memory(layout.num_bytes, device))
    try:
        # Ranks fail together, so that all of them give back what they have.
        _raise_for(process_group, fault)
        buffer = _mapped(process_group, layout, cast(SharedMemory, memory))
        _try_out(buffer)
    except PluginError:
        _release(process_group, memory)
        raise
    return buffer


def _mapped(process_group: dist.ProcessGroup, layout: PeerLayout, memory: SharedMemory) -> PeerBuffer:
    """This rank's memory as zeros, and that of the others."""
    rank, device, own = dist.get_rank(process_group), memory.storage.device, memory.storage.data_ptr()
    handles = every_rank(process_group, memory.handle)
    addresses, fault = _attempt(
        lambda: [own if other == rank else memory.open(handle) for other, handle in enumerate(handles)]
    )
    _raise_for(process_group, fault)
    memory.keep_to_those()
    buffer, fault = _attempt(
        lambda: PeerBuffer(
            layout=layout,
            rank=rank,
            own=torch.empty(0, dtype=torch.uint8, device=device).set_(memory.storage).zero_(),
            offsets=torch.tensor([address - own for address in addresses or ()], device=device),
            state=torch.zeros(layout.state_words, dtype=torch.int32, device=device),
            counts=torch.zeros(layout.size, dtype=torch.int32, device=device),
            ids=torch.zeros(layout.places, layout.top_k, dtype=torch.int32, device=device),
            weights=torch.zeros(layout.places, layout.top_k, device=device),
            memory=memory,
            process_group=process_group,
        )
    )
    _raise_for(process_group, fault)
    return cast(PeerBuffer, buffer)


def _try_out(buffer: PeerBuffer) -> None:
    """Every rank writes a number to all, as a forward would; then all numbers are zero again."""
    layout, process_group = buffer.layout, buffer.process_group
    numbers = buffer.own[layout.numbers_at : layout.numbers_at + 8 * layout.size].view(torch.int64)
    # Nobody writes before all have emptied theirs, looks before all have written, or empties before all have looked.
    every_rank(process_group, numbers.tolist())
    constants = {"RANK": buffer.rank, "SIZE": layout.size, "NUMBERS_AT": layout.numbers_at}
    with on_device(buffer.own.device):
        # The first kernel that this rank compiles: what the compiler lacks is found here.
        _, fault = _attempt(lambda: kernels.try_out[(1,)](buffer.own, buffer.offsets, **constants))
    _raise_for(process_group, fault)
    every_rank(process_group, numbers.tolist())
    missing = [rank for rank, number in enumerate(numbers.tolist()) if number >> 32 != 1]
    _raise_for(process_group, f"what ranks {missing} wrote did not arrive" if missing else "")
    numbers.zero_()
    every_rank(process_group, numbers.tolist())


def _release(process_group: dist.ProcessGroup, memory: SharedMemory | None) -> None:
    if memory is not None:
        memory.close_others()
    # Nobody's memory goes while another may have it open.
    every_rank(process_group, None)
    if memory is not None:
        memory.free()


def _attempt(action: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """What an action gives, or why it does not; an error would leave the other ranks in what they do together next."""
    try:
        return action(), ""
    except Exception as error:
        return None, str(error) if isinstance(error, OSError) else in_a_line(error)


def _raise_for(process_group: dist.ProcessGroup, fault: str) -> None:
    """`PluginError` on every rank, where any of them has a fault."""
    faults = [f"rank {rank}: {found}" for rank, found in enumerate(every_rank(process_group, fault)) if found]
    if faults:
        raise PluginError(
            f"dispatcher peer_memory: the ranks cannot use each other's memory ({'; '.join(faults)}); {_INSTEAD}"
        )
