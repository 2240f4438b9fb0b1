"""DeepEP on two GPUs of one host: whether layers are right in both modes, and what they take beside bare calls.

Run: python -m torch.distributed.run --nproc-per-node 2 benchmarks/bench_ep.py [--only checks|times]

Times are those of the slower rank. What needs no host is timed by replays of a CUDA graph of several calls, the rest by
a clock around several calls. Without GPUs all but captures can be tried out on a small layer, over the emulated
libraries of the plugin's tests: put `plugins/cuda_deepgemm` and its `tests/support` into PYTHONPATH, and for the times
the folder of the vendor's `deep_ep` into MOE_PLUGIN_DEEPEP_VENDOR.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist

# NVLink's multicast is not used, and not every machine allows it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import ep_checks
from ep_ranks import DECODE, DEVICE, FEW_TOKENS, MANY_TOKENS, ON_GPU, PREFILL, TIMED, Bench, small
from ep_sweep import low_latency_variants, normal_variants, sweep_normal
from moe_plugin_deepgemm.deepep_buffers import BUFFERS, low_latency_geometry, normal_configs, normal_geometry

from moe_core import LayerRequest, MoELayer
from moe_core.activation import SWIGLU
from moe_core.kernels import ops
from moe_core.payloads import RawWeights


def routed(bench: Bench, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of the timed layer, on the device."""
    generator = torch.Generator(DEVICE).manual_seed(bench.rank)
    hidden = torch.randn(count, TIMED["hidden_size"], device=DEVICE, generator=generator).bfloat16()
    scores = torch.rand(count, TIMED["num_experts"], device=DEVICE, generator=generator)
    weights, ids = scores.topk(TIMED["top_k"], dim=1)
    return hidden, ids, weights


def timed_layer(bench: Bench) -> MoELayer:
    """The layer that is timed, with weights made on the device."""
    request = LayerRequest(
        **TIMED, ep_size=2, a2a_backend="deepep", runner_backend="deep_gemm", workloads=(DECODE, PREFILL)
    )
    layer = MoELayer(request, environment=bench.environment, manager=bench.manager, group=bench.group)
    local, hidden, inner = len(layer.local_experts), request.hidden_size, request.intermediate_size
    w13 = torch.empty(local, 2 * inner, hidden, dtype=torch.bfloat16, device=DEVICE).normal_(std=hidden**-0.5)
    w2 = torch.empty(local, hidden, inner, dtype=torch.bfloat16, device=DEVICE).normal_(std=inner**-0.5)
    layer.load_weights(RawWeights(tensors={"w13": w13, "w2": w2}, handed_over=True))
    bench.say("\n" + str(layer.plan))
    return layer


def copies_exchange(bench: Bench, hidden: torch.Tensor, ids: torch.Tensor, *, per_rank: bool) -> Callable[[], Any]:
    """Two bare NCCL calls that send every copy of a token that DeepEP sends, and send it back."""
    share = TIMED["num_experts"] // bench.group.size
    owner = ids // share
    if per_rank:
        wanted = (owner[..., None] == torch.arange(bench.group.size, device=DEVICE)).any(1)
        rank, token = wanted.T.nonzero(as_tuple=True)
    else:
        rank, order = owner.flatten().sort(stable=True)
        token = order // ids.shape[1]
    copies = hidden[token].contiguous()
    sent = torch.bincount(rank, minlength=bench.group.size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    counts_out, counts_in = sent.tolist(), received.tolist()
    there, back = copies.new_empty((sum(counts_in), copies.shape[1])), torch.empty_like(copies)

    def call() -> None:
        dist.all_to_all_single(there, copies, counts_in, counts_out)
        dist.all_to_all_single(back, there, counts_out, counts_in)

    return call


def time_low_latency(bench: Bench, layer: MoELayer) -> None:
    """Dispatch and combine, and the whole layer, in decode."""
    import deep_gemm

    route = next(route for route in layer.plan.routes if route.phase == "decode")
    bound = next(b for b in layer._bound.routes if b.route.phase == "decode")
    geometry = low_latency_geometry(layer.plan, route, TIMED["num_experts"])
    # Held while calls use it.
    shared = BUFFERS.get(bench.group.require_process_group("the benchmark"), geometry)
    buffer, capacity = shared.buffer, geometry.capacity
    w13, w2 = layer._bound.weights["w13"], layer._bound.weights["w2"]
    for count in FEW_TOKENS:
        hidden, ids, weights = routed(bench, count)
        share = TIMED["num_experts"] // bench.group.size
        rows = torch.zeros(share, 2 * capacity, TIMED["hidden_size"], dtype=torch.bfloat16, device=DEVICE)
        expected = max(1, count * 2 * TIMED["top_k"] // TIMED["num_experts"])

        def send(hook: bool, hidden: Any = hidden, ids: Any = ids) -> Any:
            found = buffer.low_latency_dispatch(
                x=hidden,
                topk_idx=ids,
                num_max_dispatch_tokens_per_rank=capacity,
                num_experts=TIMED["num_experts"],
                use_fp8=False,
                return_recv_hook=hook,
            )
            if hook:
                found[4]()
            return found

        def back(rows: Any, handle: Any, hook: bool, ids: Any = ids, weights: Any = weights) -> Any:
            found = buffer.low_latency_combine(
                x=rows, topk_idx=ids, topk_weights=weights, handle=handle, return_recv_hook=hook
            )
            if hook:
                found[2]()
            return found[0]

        def exchange(hook: bool, rows: Any = rows) -> Any:
            return back(rows, send(hook)[2], hook)

        def whole(hook: bool, expected: int = expected) -> Any:
            tokens, counts, handle, _, _ = send(hook)
            first = torch.empty(*tokens.shape[:2], w13.shape[1], dtype=torch.bfloat16, device=DEVICE)
            deep_gemm.m_grouped_bf16_gemm_nt_masked(a=tokens, b=w13, d=first, masked_m=counts, expected_m=expected)
            inner = ops.activate(first, SWIGLU, real=counts)
            second = torch.empty_like(tokens)
            deep_gemm.m_grouped_bf16_gemm_nt_masked(a=inner, b=w2, d=second, masked_m=counts, expected_m=expected)
            return back(second, handle, hook)

        def ours(hidden: Any = hidden, ids: Any = ids, weights: Any = weights, rows: Any = rows) -> Any:
            _, handle = bound.dispatch(hidden, ids, weights)
            return bound.combine(rows, handle)

        def layer_call(hidden: Any = hidden, ids: Any = ids, weights: Any = weights) -> Any:
            return layer(hidden, ids, weights, phase="decode")

        mine, bare = layer_call(), whole(True)
        distance = float((mine.double() - bare.double()).norm() / bare.double().norm())
        bench.require(distance < 1e-2, f"{count} tokens: the layer and the bare calls differ by {distance}")
        bench.say(f"{count} tokens: the layer has the {'bits' if torch.equal(mine, bare) else 'values'} of bare calls")
        nccl = copies_exchange(bench, hidden, ids, per_rank=False)
        for how in (True, False):
            method = "graph" if how else "eager"
            found = {
                "ours": bench.time(ours, capture=how),
                "bare, hooks": bench.time(lambda: exchange(True), capture=how),
                "bare, comm stream": bench.time(lambda: exchange(False), capture=how),
                "2x NCCL": bench.time(nccl, capture=how),
            }
            variants = low_latency_variants(buffer, capacity, (hidden, ids, weights)) if how else {}
            found |= {name: bench.time(call, capture=how) for name, call in variants.items()}
            bench.say(f"dispatch + combine, low latency, {count} tokens, {method}: {_us(found)}")
            found = {
                "ours": bench.time(layer_call, capture=how),
                "hand-wired, hooks": bench.time(lambda: whole(True), capture=how),
                "hand-wired, comm stream": bench.time(lambda: whole(False), capture=how),
            }
            bench.say(f"layer, low latency, {count} tokens, {method}: {_us(found)}")


def time_normal(bench: Bench, layer: MoELayer) -> None:
    """Dispatch and combine in prefill: the host waits for counts, so that nothing is captured."""
    bound = next(b for b in layer._bound.routes if b.route.phase == "prefill")
    shared = BUFFERS.get(bench.group.require_process_group("the benchmark"), normal_geometry(layer.plan))
    buffer = shared.buffer
    to, fro = normal_configs(bench.group.size)
    for count in MANY_TOKENS:
        hidden, ids, weights = routed(bench, count)

        def ours(hidden: Any = hidden, ids: Any = ids, weights: Any = weights) -> Any:
            tokens, handle = bound.dispatch(hidden, ids, weights)
            return bound.combine(tokens.hidden_states, handle)

        def layer_call(hidden: Any = hidden, ids: Any = ids, weights: Any = weights) -> Any:
            return layer(hidden, ids, weights, phase="prefill")

        found = {
            "ours, grouped by expert": bench.time(ours, capture=False),
            "2x NCCL": bench.time(copies_exchange(bench, hidden, ids, per_rank=True), capture=False),
            "layer": bench.time(layer_call, capture=False),
        }
        variants = normal_variants(buffer, (hidden, ids, weights), to, fro)
        found |= {name: bench.time(call, capture=False) for name, call in variants.items()}
        bench.say(f"dispatch + combine, normal, {count} tokens, eager: {_us(found)}")


def _us(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f} us" for name, value in found.items())


def main() -> None:
    """Checks that cannot hurt others first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("checks", "times"), help="the other half is left out")
    only = parser.parse_args().only
    if not ON_GPU:
        import ep_emulated

        ep_emulated.install()
    bench = Bench()
    bench.say(f"torch {torch.__version__}, {attrs.asdict(bench.environment)}")
    # As long as one low-latency buffer is there, NVSHMEM stays initialised; the last check does without.
    kept = bench.layer(small(workloads=DECODE))
    if only != "times":
        for check in ep_checks.CHECKS:
            bench.run(check)
    if only != "checks":
        layer = timed_layer(bench)
        bench.run(time_low_latency, layer)
        bench.run(time_normal, layer)
        del layer
        bench.run(sweep_normal, routed)
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
