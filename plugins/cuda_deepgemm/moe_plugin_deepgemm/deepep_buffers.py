"""Buffers of DeepEP, one for everything that has the same geometry.

A buffer belongs to one mode and one geometry: layers that agree in them share it, a draft layer of another size gets
its own. Making one and freeing one wait for all ranks of the group.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch.distributed as dist

from moe_core import rank_buffers
from moe_core.errors import InputError, PluginError
from moe_core.kernel_library import import_library
from moe_core.plan import MoEPlan, Route
from moe_plugin_deepgemm.deepep_specs import DEEP_EP
from moe_plugin_deepgemm.nvshmem_settings import nvshmem_settings

_LOW_LATENCY = "low_latency"
#: Rows of a block of the low-latency mode come in multiples of this.
_ROWS = 4
#: Ranks -> multiprocessors of both directions (even), tokens of a chunk that is sent, and room for received ones; the
#: library's own for others. On two H200, 4096 tokens of H 7168, dispatch and combine took 924 us with 20
#: multiprocessors, which is the library's number, 487 with 48, 454 with 64, 434 with 96 and 416 with 128, each for
#: its share of the buffer. Every whole card of these generations has more than 64 (H20: 78).
_NORMAL_CHUNKS = {2: (64, 8, 256)}


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


class BufferRegistry(rank_buffers.BufferRegistry[Geometry]):
    """The buffers of this process."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__(self._made, lambda buffer: buffer.destroy())

    def _made(self, process_group: dist.ProcessGroup, geometry: Geometry) -> Any:
        """Raises `PluginError` for ranks on several hosts, or others than those of a low-latency buffer that exists."""
        if geometry.mode == _LOW_LATENCY:
            self._check_ranks(process_group)
        rank_buffers.check_one_host(process_group, "deepep")
        return _make(process_group, geometry)

    def _check_ranks(self, process_group: dist.ProcessGroup) -> None:
        """NVSHMEM is initialised once, for one set of ranks."""
        mine = dist.get_process_group_ranks(process_group)
        for other, geometry in self.geometries():
            theirs = dist.get_process_group_ranks(other)
            if geometry.mode == _LOW_LATENCY and mine != theirs:
                raise PluginError(
                    f"deepep.low_latency serves the ranks {theirs} in this process and cannot serve {mine}: NVSHMEM "
                    "is initialised once; use one group, or deepep.normal"
                )


def _make(process_group: dist.ProcessGroup, geometry: Geometry) -> Any:
    deep_ep, size = import_library(DEEP_EP), dist.get_world_size(process_group)
    if geometry.mode != _LOW_LATENCY:
        num_bytes = _normal_bytes(size, geometry)
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


def normal_configs(num_ranks: int) -> tuple[Any, Any]:
    """How dispatch and combine of the normal mode send, for every call: the library's default is one of the process.

    Both have the same number of multiprocessors, since combine goes back the ways of its dispatch. It does not depend
    on what runs beside: that waits less for many multiprocessors that are soon free again than for the tokens.
    """
    deep_ep = import_library(DEEP_EP)
    if num_ranks in _NORMAL_CHUNKS:
        config = deep_ep.Config(*_NORMAL_CHUNKS[num_ranks])
        return config, config
    return deep_ep.Buffer.get_dispatch_config(num_ranks), deep_ep.Buffer.get_combine_config(num_ranks)


def _normal_bytes(num_ranks: int, geometry: Geometry) -> int:
    """Bytes that dispatch and combine need, with tokens of 16 bits: fp8 tokens and their scales are less."""
    configs = normal_configs(num_ranks)
    return max(int(config.get_nvl_buffer_size_hint(2 * geometry.hidden_size, num_ranks)) for config in configs)


BUFFERS = BufferRegistry()
