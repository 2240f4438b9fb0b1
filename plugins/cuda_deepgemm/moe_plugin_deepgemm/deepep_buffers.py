"""Buffers of DeepEP, one for everything that has the same geometry.

A buffer is made by all ranks of a process group together and belongs to one mode and one geometry: layers that agree in
them share it, a draft layer of another size gets its own. Making one and freeing one wait for all ranks of the group.
"""

from __future__ import annotations

import math
import platform
import threading
import weakref
from typing import Any

import attrs
import torch.distributed as dist

from moe_core.errors import InputError, PluginError
from moe_core.kernel_library import import_library
from moe_core.payloads import ExpertGroup
from moe_core.plan import MoEPlan, Route
from moe_plugin_deepgemm.deepep_specs import DEEP_EP
from moe_plugin_deepgemm.nvshmem_settings import nvshmem_settings

_LOW_LATENCY = "low_latency"
#: Rows of a block of the low-latency mode come in multiples of this.
_ROWS = 4


@attrs.frozen(kw_only=True)
class Geometry:
    """What a buffer is for; equal on all ranks.

    Attributes:
        mode: `normal` or `low_latency`.
        hidden_size: H.
        num_experts: The library's experts; of the low-latency mode.
        capacity: Most tokens of one rank in one forward, a whole number of row alignments over all ranks; of the
            low-latency mode.
    """

    mode: str
    hidden_size: int
    num_experts: int = 0
    capacity: int = 0


def normal_geometry(plan: MoEPlan) -> Geometry:
    """A normal buffer holds a few tokens of each rank at a time, whatever their number and experts."""
    return Geometry(mode="normal", hidden_size=plan.request.hidden_size)


def low_latency_geometry(plan: MoEPlan, route: Route, num_experts: int) -> Geometry:
    """A low-latency buffer has a place for every token of every rank in every expert."""
    if route.max_tokens is None:
        raise InputError("deepep.low_latency needs a bound on the tokens of a rank; declare Workload(max_tokens=...)")
    rows = math.lcm(route.row_alignment, _ROWS)
    step = rows // math.gcd(rows, plan.request.ep_size)
    return Geometry(
        mode=_LOW_LATENCY,
        hidden_size=plan.request.hidden_size,
        num_experts=num_experts,
        capacity=-(-route.max_tokens // step) * step,
    )


@attrs.define(eq=False)
class SharedBuffer:
    """A buffer in use: it stays as long as somebody holds this.

    Attributes:
        buffer: The library's.
    """

    buffer: Any


@attrs.define(eq=False)
class _Place:
    """Where one buffer is kept; it is unused when nobody holds its `SharedBuffer` any more."""

    buffer: Any
    user: weakref.ref[SharedBuffer]

    def shared(self) -> SharedBuffer:
        shared = self.user()
        if shared is None:
            shared = SharedBuffer(self.buffer)
            self.user = weakref.ref(shared)
        return shared


class BufferRegistry:
    """The buffers of this process.

    Warning:
        The ranks of a group must ask for their buffers in the same order, and one thread after the other: whoever makes
        one waits for the other ranks.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        # A process group is compared by identity and kept alive, since a later one may get the same name.
        self._places: dict[dist.ProcessGroup, dict[Geometry, _Place]] = {}

    def get(self, group: ExpertGroup, geometry: Geometry) -> SharedBuffer:
        """The buffer of a geometry, made by all ranks of `group` at the first call; unused ones are freed before.

        Raises:
            InputError: The group has no process group.
            PluginError: The ranks are on several hosts, or others than those of a low-latency buffer that exists.
        """
        ranks = group.require_process_group("dispatcher deepep")
        with self._lock:
            places = self._places.setdefault(ranks, {})
            if geometry not in places:
                self._free_unused(ranks)
                if geometry.mode == _LOW_LATENCY:
                    self._check_ranks(ranks)
                buffer = _make(ranks, geometry)
                shared = SharedBuffer(buffer)
                places[geometry] = _Place(buffer, weakref.ref(shared))
                return shared
            return places[geometry].shared()

    def free_unused(self, process_group: dist.ProcessGroup) -> int:
        """Free the buffers of a group that no layer uses on any of its ranks; all ranks call this together.

        Layers go when Python collects them, which ranks do at different times, while a buffer goes on all ranks at
        once: so it happens here, and when a buffer of another geometry is made.

        Returns:
            How many were freed.
        """
        with self._lock:
            return self._free_unused(process_group)

    def _free_unused(self, process_group: dist.ProcessGroup) -> int:
        places = self._places.get(process_group, {})
        if not places:
            return 0
        unused = {geometry for geometry, place in places.items() if place.user() is None}
        everywhere = set.intersection(*_every_rank(process_group, unused))
        for geometry in sorted(everywhere, key=attrs.astuple):
            places.pop(geometry).buffer.destroy()
        return len(everywhere)

    def _check_ranks(self, process_group: dist.ProcessGroup) -> None:
        """NVSHMEM is initialised once, for one set of ranks."""
        mine = dist.get_process_group_ranks(process_group)
        for other, places in self._places.items():
            if any(geometry.mode == _LOW_LATENCY for geometry in places):
                theirs = dist.get_process_group_ranks(other)
                if mine != theirs:
                    raise PluginError(
                        f"deepep.low_latency serves the ranks {theirs} in this process and cannot serve {mine}: "
                        "NVSHMEM is initialised once; use one group, or deepep.normal"
                    )


def _every_rank(process_group: dist.ProcessGroup, mine: Any) -> list[Any]:
    shown: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(shown, mine, group=process_group)
    return shown


def _make(process_group: dist.ProcessGroup, geometry: Geometry) -> Any:
    hosts = sorted(set(_every_rank(process_group, platform.node())))
    if len(hosts) > 1:
        raise PluginError(
            f"dispatcher deepep is declared for the GPUs of one host, these ranks are on {', '.join(hosts)}; pin "
            "a2a_backend='torch_alltoall'"
        )
    deep_ep, size = import_library(DEEP_EP), dist.get_world_size(process_group)
    if geometry.mode != _LOW_LATENCY:
        num_bytes = _normal_bytes(deep_ep, size, geometry)
        return deep_ep.Buffer(group=process_group, num_nvl_bytes=num_bytes, explicitly_destroy=True)
    with nvshmem_settings(geometry.capacity):
        return deep_ep.Buffer(
            group=process_group,
            num_rdma_bytes=deep_ep.Buffer.get_low_latency_rdma_size_hint(
                geometry.capacity, geometry.hidden_size, size, geometry.num_experts
            ),
            low_latency_mode=True,
            num_qps_per_rank=geometry.num_experts // size,
            explicitly_destroy=True,
        )


def _normal_bytes(deep_ep: Any, num_ranks: int, geometry: Geometry) -> int:
    """Bytes that dispatch and combine need, with tokens of 16 bits: fp8 tokens and their scales are less."""
    configs = deep_ep.Buffer.get_dispatch_config(num_ranks), deep_ep.Buffer.get_combine_config(num_ranks)
    return max(int(config.get_nvl_buffer_size_hint(2 * geometry.hidden_size, num_ranks)) for config in configs)


BUFFERS = BufferRegistry()
