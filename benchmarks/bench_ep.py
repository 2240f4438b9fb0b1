"""DeepEP on the GPUs of one host: whether layers are right in both modes, and what they take beside bare calls.

Run: python -m torch.distributed.run --nproc-per-node N benchmarks/bench_ep.py [--only checks|times]

N is 2, 4 or 8: the numbers of ranks that the normal mode takes. Times are those of the slowest rank. What needs no host
is timed by replays of a CUDA graph of several calls, the rest by a clock around several calls. Without GPUs all but
captures can be tried out on a small layer, over the emulated libraries of the plugin's tests: put
`plugins/cuda_deepgemm` and its `tests/support` into PYTHONPATH, and for the times the folder of the vendor's `deep_ep`
into MOE_PLUGIN_DEEPEP_VENDOR.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist

# NVLink's multicast is not used, and not every machine allows it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import ep_checks
from ep_bare import LowLatency, Normal, nccl
from ep_ranks import DECODE, DEVICE, FEW_TOKENS, MANY_TOKENS, ON_GPU, Bench, Tokens
from ep_sweep import sweep_normal
from moe_plugin_deepgemm.deepep_buffers import BUFFERS, low_latency_geometry, normal_configs, normal_geometry

from moe_core import MoELayer
from moe_core.payloads import RawWeights


def timed_layer(bench: Bench) -> MoELayer:
    """The layer that is timed, with weights made on the device."""
    request = bench.timed
    layer = MoELayer(request, environment=bench.environment, manager=bench.manager, group=bench.group)
    local, hidden, inner = len(layer.local_experts), request.hidden_size, request.intermediate_size
    w13 = torch.empty(local, 2 * inner, hidden, dtype=torch.bfloat16, device=DEVICE).normal_(std=hidden**-0.5)
    w2 = torch.empty(local, hidden, inner, dtype=torch.bfloat16, device=DEVICE).normal_(std=inner**-0.5)
    layer.load_weights(RawWeights(tensors={"w13": w13, "w2": w2}, handed_over=True))
    bench.say("\n" + str(layer.plan))
    return layer


def time_low_latency(bench: Bench, layer: MoELayer) -> None:
    """Dispatch and combine, and the whole layer, in decode."""
    route = next(route for route in layer.plan.routes if route.phase == "decode")
    geometry = low_latency_geometry(layer.plan, route, bench.timed.num_experts)
    # Held while calls use it.
    shared = BUFFERS.get(bench.group.require_process_group("the benchmark"), geometry)
    for count in FEW_TOKENS:
        tokens = bench.routed(count)
        bare = LowLatency(shared.buffer, geometry.capacity, geometry.num_experts, tokens)
        time_decode_exchange(bench, layer, bare)
        time_decode_layer(bench, layer, bare)


def time_decode_exchange(bench: Bench, layer: MoELayer, bare: LowLatency) -> None:
    """Dispatch and combine in decode, of rows that nobody computed."""
    bound = next(b for b in layer._bound.routes if b.route.phase == "decode")
    request, size, count = bench.timed, bench.group.size, len(bare.tokens[0])
    rows_shape = request.num_experts // size, size * bare.capacity, request.hidden_size
    rows = torch.zeros(rows_shape, dtype=torch.bfloat16, device=DEVICE)

    def ours() -> Any:
        return bound.combine(rows, bound.dispatch(*bare.tokens)[1])

    calls = {
        "ours": ours,
        "bare, hooks": partial(bare.there_and_back, rows, hook=True),
        "bare, comm stream": partial(bare.there_and_back, rows, hook=False),
        "2x NCCL, a copy per token and expert": nccl(bare.tokens, request.num_experts, per_rank=False),
    }
    in_place = {
        "bare, zero copy": partial(bare.in_place, fp8=False),
        "bare, fp8, zero copy": partial(bare.in_place, fp8=True),
    }
    bench.compare(f"dispatch + combine, low latency, {count} tokens", calls | in_place, capture=True)
    bench.compare(f"dispatch + combine, low latency, {count} tokens", calls, capture=False)


def time_decode_layer(bench: Bench, layer: MoELayer, bare: LowLatency) -> None:
    """The whole layer in decode, which has to have the values of bare calls."""
    request, count = bench.timed, len(bare.tokens[0])
    expected = max(1, count * bench.group.size * request.top_k // request.num_experts)
    by_hand = partial(bare.layer, layer._bound.weights["w13"], layer._bound.weights["w2"], expected)
    ours = partial(layer, *bare.tokens, phase="decode")
    mine, other = ours(), by_hand(hook=True)
    distance = float((mine.double() - other.double()).norm() / other.double().norm())
    bench.require(distance < 1e-2, f"{count} tokens: the layer and the bare calls differ by {distance}")
    bench.say(f"{count} tokens: the layer has the {'bits' if torch.equal(mine, other) else 'values'} of bare calls")
    calls = {
        "ours": ours,
        "hand-wired, hooks": partial(by_hand, hook=True),
        "hand-wired, comm stream": partial(by_hand, hook=False),
    }
    for capture in (True, False):
        bench.compare(f"layer, low latency, {count} tokens", calls, capture=capture)


def time_normal(bench: Bench, layer: MoELayer) -> None:
    """Dispatch and combine in prefill, and the whole layer."""
    shared = BUFFERS.get(bench.group.require_process_group("the benchmark"), normal_geometry(layer.plan))
    for count in MANY_TOKENS:
        time_prefill(bench, layer, shared.buffer, bench.routed(count))


def time_prefill(bench: Bench, layer: MoELayer, buffer: Any, tokens: Tokens) -> None:
    """The host waits for counts, so that nothing is captured."""
    bound = next(b for b in layer._bound.routes if b.route.phase == "prefill")
    num_experts = bench.timed.num_experts

    def ours() -> Any:
        received, handle = bound.dispatch(*tokens)
        return bound.combine(received.hidden_states, handle)

    calls = {
        "ours, grouped by expert": ours,
        "2x NCCL, a copy per token and rank": nccl(tokens, num_experts, per_rank=True),
        "2x NCCL, a copy per token and expert": nccl(tokens, num_experts, per_rank=False),
        "layer": partial(layer, *tokens, phase="prefill"),
        **Normal(buffer, num_experts, tokens).variants(*normal_configs(bench.group.size)),
    }
    bench.compare(f"dispatch + combine, normal, {len(tokens[0])} tokens", calls, capture=False)


def main() -> None:
    """Checks that cannot hurt others first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("checks", "times"), help="the other half is left out")
    only = parser.parse_args().only
    if not ON_GPU:
        import ep_emulated

        ep_emulated.install()
    bench = Bench()
    bench.say(f"torch {torch.__version__}, {bench.group.size} ranks, {attrs.asdict(bench.environment)}")
    # As long as one low-latency buffer is there, NVSHMEM stays initialised; the last check does without.
    kept = bench.layer(bench.small(workloads=DECODE))
    if only != "times":
        for check in ep_checks.CHECKS:
            bench.run(check)
    if only != "checks":
        layer = timed_layer(bench)
        bench.run(time_low_latency, layer)
        bench.run(time_normal, layer)
        del layer
        bench.run(sweep_normal)
    del kept
    if only != "times":
        bench.run(ep_checks.check_buffers)
    bench.say(f"done: {len(bench.failed)} failed")
    faulthandler.cancel_dump_traceback_later()
    if bench.group.process_group is not None:
        gc.collect()
        BUFFERS.free_unused(bench.group.process_group)
    dist.destroy_process_group()
    raise SystemExit(len(bench.failed))


if __name__ == "__main__":
    main()
