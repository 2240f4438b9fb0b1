"""Whether layers are right: values, refusals, layers that alternate, captured graphs, and buffers that go."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from ep_contenders import DEEP_EP, Contender
from ep_ranks import DECODE, DEVICE, ON_GPU, Bench, Wrong
from moe_plugin_deepgemm.deepep_buffers import BUFFERS

from moe_core.errors import InputError
from moe_core.quant import QuantScheme

#: Steps of layers in turns, of which every second is a prefill.
STEPS = 1000 if ON_GPU else 24
#: Of the whole output, against float64: see the tests of the plugins.
_FLOATS, _QUANTIZED = 1e-2, 5e-2


def tolerance(quant: QuantScheme) -> float:
    """Largest relative error of a layer."""
    return _QUANTIZED if quant.is_quantized else _FLOATS


def cases(rank: int, size: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name -> tokens of this rank, and ranks whose experts none of them names."""
    return {
        "uneven": (7 + rank - 4 * (rank % 2), ()),
        "a rank without tokens": (4 + rank if rank else 0, ()),
        "no tokens": (0, ()),
        "most of one rank": (1 if rank else 128, ()),
        "a rank without rows": (5 + rank, (size - 1,)),
        "nobody's own": (6, (rank,)),
    }


def check_values(bench: Bench, contender: Contender) -> None:
    """Both phases, all forms, uneven and missing tokens, ranks that get none, with and without an overlap."""
    for quant, wire in contender.forms:
        request = bench.small(contender, quant=quant, dispatch_dtype=wire)
        layer = bench.layer(request)
        for phase in ("decode", "prefill"):
            for seed, (name, (count, spared)) in enumerate(cases(bench.rank, bench.group.size).items()):
                tokens = bench.tokens(request, count, seed, spared)
                output = layer(*tokens, phase=phase)
                overlapped = layer(*tokens, phase=phase, overlap=lambda: torch.ones(1, device=DEVICE).add_(1))
                bench.require(torch.equal(output, overlapped), f"overlap changes {quant} {phase}, {name}")
                error = bench.error(request, output, tokens)
                bench.require(error < tolerance(quant), f"{contender.name}, {quant} {phase}, {name}: {error}")
            token_dtype = next(route.token_dtype for route in layer.plan.routes if route.phase == phase)
            bench.say(f"ok: {contender.name}, {quant}, tokens in {token_dtype}, {phase}: last error {error:.1e}")


def check_refusals(bench: Bench, contender: Contender) -> None:
    """Too many tokens raise before anything is sent, and the next forward is right."""
    request = bench.small(contender)
    layer = bench.layer(request)
    for _ in range(2):
        try:
            layer(*bench.tokens(request, 129, seed=0), phase="decode")
            bench.require(False, "129 tokens of 128 were taken")
        except InputError:
            pass
    tokens = bench.tokens(request, 4, seed=1)
    bench.require(bench.error(request, layer(*tokens, phase="decode"), tokens) < 1e-2, "a forward after a refusal")
    leftover = sorted(name for name in os.environ if name.startswith("NVSHMEM_IB") or name == "NVSHMEM_MAX_TEAMS")
    bench.require(not leftover, f"variables are left: {leftover}")
    bench.say(f"ok: {contender.name}, too many tokens are refused, the environment is as it was")


def check_mixture(bench: Bench, contender: Contender) -> None:
    """A target, quantized if a form is, and an unquantized draft of another geometry alternate; memory stays."""
    (draft, _), *_, (target, _) = (*contender.forms, contender.forms[-1])
    layers = []
    for quant, fields in ((target, {}), (draft, {"num_experts": 2 * bench.group.size})):
        request = bench.small(contender, quant=quant, **fields)
        layers.append((quant, request, bench.layer(request)))
    worst, used = [0.0, 0.0], {}
    for step in range(1, STEPS + 1):
        phase = "prefill" if step % 2 == 0 else "decode"
        for place, (_, request, layer) in enumerate(layers):
            count = (37 if phase == "prefill" else 5) + 3 * bench.rank
            tokens = bench.tokens(request, count, seed=step % 5)
            output = layer(*tokens, phase=phase)
            if min(step, STEPS - step) < 8:
                worst[place] = max(worst[place], bench.error(request, output, tokens))
            # What is left between steps is compared.
            del output, tokens
        if ON_GPU and step in (min(50, STEPS // 2), STEPS):
            torch.cuda.synchronize()
            used[step] = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0])
    are_right = all(error < tolerance(quant) for error, (quant, _, _) in zip(worst, layers, strict=True))
    bench.require(are_right, f"{contender.name}, a mixture: {worst}")
    bench.require(len(set(used.values())) <= 1, f"{contender.name}: memory changes: {used}")
    bench.say(
        f"ok: {contender.name}, {STEPS} steps of a target in {target} and a draft in {draft}, errors {worst}, "
        f"allocated, reserved, free {used}"
    )


def check_capture(bench: Bench, contender: Contender) -> None:
    """A captured decode is replayed with other routings, between eager forwards."""
    for quant, wire in contender.forms:
        request = bench.small(contender, quant=quant, dispatch_dtype=wire)
        layer = bench.layer(request)
        static = bench.tokens(request, 16, seed=0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                layer(*static, phase="decode")
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        dist.barrier()
        with torch.cuda.graph(graph):
            output = layer(*static, phase="decode")
        for seed in range(1, 6):
            tokens = bench.tokens(request, 16, seed=seed)
            for place, value in zip(static, tokens, strict=True):
                place.copy_(value)
            graph.replay()
            replayed = output.clone()
            eager = layer(*tokens, phase="prefill" if seed == 3 else "decode")
            if seed != 3:
                bench.require(torch.equal(replayed, eager), f"{contender.name}, {quant}: a replay differs")
            error = bench.error(request, replayed, tokens)
            bench.require(error < tolerance(quant), f"{contender.name}, {quant}: a replay is wrong: {error}")
        bench.say(f"ok: {contender.name}, {quant}, a captured decode gives the bits of eager ones for 5 routings")


def check_buffers(bench: Bench) -> None:
    """Buffers of DeepEP go with their last layer; another low-latency one lives on, and a new one can be made."""
    kept, ranks, size = bench.small(DEEP_EP), bench.group.process_group, bench.group.size
    layer = bench.layer(kept)
    other = bench.layer(bench.small(DEEP_EP, num_experts=4 * size, workloads=DECODE))
    if ranks is None:
        raise Wrong("no process group")
    before = torch.cuda.mem_get_info()[0] if ON_GPU else 0
    del other
    freed = BUFFERS.free_unused(ranks)
    after = torch.cuda.mem_get_info()[0] if ON_GPU else 0
    tokens = bench.tokens(kept, 5, seed=2)
    bench.require(freed >= 1, f"freed {freed} buffers")
    bench.require(bench.error(kept, layer(*tokens, phase="decode"), tokens) < 1e-2, "a layer beside a freed buffer")
    request = bench.small(DEEP_EP, num_experts=5 * size, workloads=DECODE)
    again = bench.layer(request)
    tokens = bench.tokens(request, 5, seed=3)
    bench.require(
        bench.error(request, again(*tokens, phase="decode"), tokens) < 1e-2, "a buffer made after a freed one"
    )
    del layer, again
    all_freed = BUFFERS.free_unused(ranks)
    last = bench.layer(request)
    bench.require(bench.error(request, last(*tokens, phase="decode"), tokens) < 1e-2, "the first buffer after the last")
    bench.say(f"ok: {freed} and {all_freed} buffers freed ({(after - before) >> 20} MiB at first), new ones work")


#: Of every contender; `check_buffers` leaves NVSHMEM without any buffer for a moment.
CHECKS = (check_values, check_refusals, check_mixture, *((check_capture,) if ON_GPU else ()))
