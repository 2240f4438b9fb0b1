"""What a forward holds beside weights and inputs."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from moe_core.payloads import TORCH_DTYPES
from moe_core.request import LayerRequest
from moe_core.tuning.timing import Call, synchronize


def held_bytes(call: Call, device: str) -> int:
    """The largest number of bytes that a call held beyond those before it; its result counts."""
    if device == "cpu":
        return _held_on_cpu(call)
    torch.accelerator.memory.reset_peak_memory_stats()
    before = torch.accelerator.memory.memory_allocated()
    call()
    synchronize(device)
    return int(torch.accelerator.memory.max_memory_allocated() - before)


def _held_on_cpu(call: Call) -> int:
    # The allocator of the CPU keeps no statistics.
    # `acc_events` changes nothing in a single cycle, but without it torch before 2.13 warns.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    events = [event for event in results.events() if event.name() == "[memory]"] if results is not None else []
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    return max(accumulate(change for _, change in changes), default=0)


def activation_bytes(request: LayerRequest, num_tokens: int) -> int:
    """Bytes of the rows after the first product, after the activation and after the second product, all at once.

    `2I + I + H` values per routed row of a gated layer: what a layer without fused parts writes.
    """
    inner = request.local_intermediate_size * (request.activation.rows_per_channel + 1)
    return num_tokens * request.top_k * (inner + request.hidden_size) * TORCH_DTYPES[request.dtype].itemsize


def free_bytes(device: str) -> int | None:
    """Memory that is left on an NVIDIA GPU, what torch keeps for itself included; None elsewhere."""
    if device != "cuda":
        return None
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0]) + kept
