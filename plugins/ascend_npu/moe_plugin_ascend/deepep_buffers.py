"""Buffers of Ascend's DeepEP, one for everything that has the same geometry.

A buffer belongs to one mode and, in the low-latency mode, to one geometry: layers that agree in them share it, a draft
layer of another size gets its own.
"""

from __future__ import annotations

import importlib
from typing import Any

import attrs
import torch.distributed as dist

from moe_core.errors import InputError
from moe_core.kernel_library import import_library
from moe_core.plan import MoEPlan, Route
from moe_core.rank_buffers import BufferRegistry
from moe_plugin_ascend.deepep_specs import DEEP_EP
from moe_plugin_ascend.operators import has_npu


@attrs.frozen(kw_only=True)
class Geometry:
    """What a buffer is for; equal on all ranks.

    Attributes:
        mode: `normal` or `low_latency`; the fused call runs on a buffer of the latter.
        hidden_size: H; of the low-latency mode, as what follows.
        num_experts: The library's experts, as many on every rank.
        capacity: Most tokens of one rank in one forward.
    """

    mode: str
    hidden_size: int = 0
    num_experts: int = 0
    capacity: int = 0


#: A normal buffer takes any tokens.
NORMAL = Geometry(mode="normal")


def low_latency_geometry(plan: MoEPlan, route: Route, num_experts: int) -> Geometry:
    """A low-latency buffer has a place for every token of every rank in every expert.

    Raises:
        InputError: The workload has no bound on its tokens.
    """
    if route.max_tokens is None:
        part = route.dispatcher or route.runner
        raise InputError(f"{part.full_name} needs a bound on the tokens of a rank; declare Workload(max_tokens=...)")
    return Geometry(
        mode="low_latency",
        hidden_size=plan.request.hidden_size,
        num_experts=num_experts,
        capacity=route.max_tokens,
    )


def library() -> Any:
    """Ascend's `deep_ep` where an NPU is, else its emulation; raises `PluginError` where it cannot be imported."""
    return import_library(DEEP_EP) if has_npu() else importlib.import_module("moe_plugin_ascend.emulation.deep_ep")


def _make(process_group: dist.ProcessGroup, geometry: Geometry) -> Any:
    deep_ep = library()
    if geometry == NORMAL:
        return deep_ep.Buffer(process_group, low_latency_mode=False)
    ranks = dist.get_world_size(process_group)
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        geometry.capacity, geometry.hidden_size, ranks, geometry.num_experts
    )
    return deep_ep.Buffer(
        process_group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=geometry.num_experts // ranks,
    )


def _free(buffer: Any) -> None:
    """The library has no call for it: the memory goes with the last reference."""


BUFFERS = BufferRegistry(_make, _free)
