"""Buffers of Ascend's DeepEP, one for everything that has the same geometry.

A buffer is made by all ranks together and belongs to one process group, one mode and one geometry: layers that agree
in them share it, a draft layer of another size gets its own.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import attrs
import torch.distributed as dist

from moe_core.errors import InputError
from moe_core.kernel_library import import_library
from moe_core.payloads import ExpertGroup
from moe_core.plan import MoEPlan, Route
from moe_plugin_ascend.deepep_specs import DEEP_EP
from moe_plugin_ascend.operators import has_npu


@attrs.frozen(kw_only=True)
class BufferKey:
    """What a buffer is for.

    Attributes:
        process_group: Its ranks; compared by identity, and kept alive, since a later group may get the same name.
        mode: `normal`, `low_latency` or `fused`.
        hidden_size: H.
        num_experts: The library's experts, as many on every rank.
        top_k: K.
        capacity: Most tokens of one rank in one forward.
    """

    process_group: dist.ProcessGroup
    mode: str
    hidden_size: int
    num_experts: int
    top_k: int
    capacity: int


def buffer_key(plan: MoEPlan, route: Route, group: ExpertGroup, mode: str) -> BufferKey:
    """The buffer that a route needs on this rank.

    Raises:
        InputError: The group has no process group to send through, or the workload no bound on its tokens.
    """
    part = route.dispatcher or route.runner
    if route.max_tokens is None:
        raise InputError(f"{part.full_name} needs a bound on the tokens of a rank; declare Workload(max_tokens=...)")
    request = plan.request
    return BufferKey(
        process_group=group.require_process_group(part.full_name),
        mode=mode,
        hidden_size=request.hidden_size,
        num_experts=request.max_local_experts * request.ep_size,
        top_k=request.top_k,
        capacity=route.max_tokens,
    )


class _Place:
    """Where one buffer is made and kept."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buffer: Any = None


class BufferRegistry:
    """The buffers of this process.

    One that is being made keeps nobody from another: making it may wait for other ranks, in whichever order they make
    theirs.
    """

    def __init__(self, make: Callable[[BufferKey], Any]) -> None:
        """Start empty; `make` builds a buffer, with all ranks of its group."""
        self._make = make
        self._lock = threading.Lock()
        self._places: dict[BufferKey, _Place] = {}

    def get(self, key: BufferKey) -> Any:
        """The buffer of `key`, made at the first call."""
        with self._lock:
            place = self._places.setdefault(key, _Place())
        with place.lock:
            if place.buffer is None:
                place.buffer = self._make(key)
            return place.buffer


def library() -> Any:
    """Ascend's `deep_ep` where an NPU is, else its emulation; raises `PluginError` where it cannot be imported."""
    return import_library(DEEP_EP) if has_npu() else importlib.import_module("moe_plugin_ascend.emulation.deep_ep")


def _make(key: BufferKey) -> Any:
    deep_ep = library()
    if key.mode == "normal":
        return deep_ep.Buffer(key.process_group, low_latency_mode=False)
    ranks = dist.get_world_size(key.process_group)
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(key.capacity, key.hidden_size, ranks, key.num_experts)
    return deep_ep.Buffer(
        key.process_group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=key.num_experts // ranks,
    )


BUFFERS = BufferRegistry(_make)
