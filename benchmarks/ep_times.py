"""What dispatch and combine take, alone and in whole layers, beside bare calls of libraries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from ep_bare import LowLatency, Normal, nccl
from ep_contenders import CONTENDERS, DEEP_EP, Contender
from ep_ranks import DEVICE, FEW_TOKENS, MANY_TOKENS, ON_GPU, Bench, Tokens
from moe_plugin_deepgemm.deepep_buffers import BUFFERS, low_latency_geometry, normal_configs, normal_geometry

from moe_core import MoELayer
from moe_core.bound import BoundRoute
from moe_core.payloads import RawWeights

#: Tokens per rank in each phase.
COUNTS = {"decode": FEW_TOKENS, "prefill": MANY_TOKENS}
#: Relative distance of two bf16 layers that are computed in other orders.
_CLOSE = 1e-2
_Layers: TypeAlias = Mapping[str, MoELayer]
_Call: TypeAlias = Callable[[], Any]


def time_everything(bench: Bench) -> None:
    """Dispatch and combine, and whole layers, of all contenders side by side."""
    layers = {contender.name: timed_layer(bench, contender) for contender in CONTENDERS}
    for phase, counts in COUNTS.items():
        for count in counts:
            bench.run(time_phase, layers, phase, count)


def timed_layer(bench: Bench, contender: Contender) -> MoELayer:
    """The layer of a contender that is timed, with weights made on the device, for all contenders the same."""
    request = bench.timed(contender)
    layer = MoELayer(request, environment=bench.environment, manager=bench.manager, group=bench.group)
    local, hidden, inner = len(layer.local_experts), request.hidden_size, request.intermediate_size
    generator = torch.Generator(DEVICE).manual_seed(bench.rank)
    w13 = torch.empty(local, 2 * inner, hidden, dtype=torch.bfloat16, device=DEVICE)
    w2 = torch.empty(local, hidden, inner, dtype=torch.bfloat16, device=DEVICE)
    w13.normal_(std=hidden**-0.5, generator=generator)
    w2.normal_(std=inner**-0.5, generator=generator)
    layer.load_weights(RawWeights(tensors={"w13": w13, "w2": w2}, handed_over=True))
    bench.say(f"\n{contender.name}: {layer.plan}")
    return layer


def time_phase(bench: Bench, layers: _Layers, phase: str, count: int) -> None:
    """One number of tokens."""
    tokens = bench.routed(count)
    bare = bare_calls(bench, layers[DEEP_EP.name], phase, tokens)
    for what, compare in (("dispatch + combine", time_exchanges), ("layer", time_layers)):
        compare(bench, f"{what}, {phase}, {count} tokens", layers, bare, tokens, phase)


def bound_route(layer: MoELayer, phase: str) -> BoundRoute:
    """The functions of a layer for a phase."""
    return next(bound for bound in layer._bound.routes if bound.route.phase == phase)


def bare_calls(bench: Bench, layer: MoELayer, phase: str, tokens: Tokens) -> LowLatency | Normal:
    """Calls of DeepEP itself, on the buffer that its layer holds."""
    route, num_experts = bound_route(layer, phase).route, layer.request.num_experts
    group = bench.group.require_process_group("the benchmark")
    if phase == "prefill":
        buffer = BUFFERS.get(group, normal_geometry(layer.plan)).buffer
        return Normal(buffer, num_experts, tokens, normal_configs(bench.group.size))
    geometry = low_latency_geometry(layer.plan, route, num_experts)
    weights = layer._bound.weights
    return LowLatency(
        BUFFERS.get(group, geometry).buffer, geometry.capacity, num_experts, tokens, (weights["w13"], weights["w2"])
    )


def waiting(layers: _Layers, phase: str) -> set[str]:
    """Layers in whose forwards the host waits for the device, so that they cannot be captured."""
    routes = {name: bound_route(layer, phase).route for name, layer in layers.items()}
    parts = {name: (route.dispatcher, route.runner) for name, route in routes.items()}
    return {name for name, pair in parts.items() if not all(part.spec.graph_safe for part in pair if part is not None)}


def time_exchanges(
    bench: Bench, what: str, layers: _Layers, bare: LowLatency | Normal, tokens: Tokens, phase: str
) -> None:
    """Dispatch and combine, of rows that nobody computed."""
    ours = {name: partial(there_and_back, bound_route(layer, phase), tokens) for name, layer in layers.items()}
    library = bare.exchanges()
    by_nccl = {
        f"2x NCCL, a copy per token and {per}": nccl(tokens, bare.num_experts, per_rank=per == "rank")
        for per in ("rank", "expert")
    }
    not_captured = waiting(layers, phase) | set(library if bare.waits else ())
    compare_all(bench, what, ours | library | by_nccl, not_captured)


def there_and_back(bound: BoundRoute, tokens: Tokens) -> torch.Tensor:
    """Dispatch, and combine of what arrived."""
    dispatched, handle = bound.dispatch(*tokens)  # type: ignore[misc]
    return bound.combine(dispatched.hidden_states, handle)  # type: ignore[misc]


def time_layers(
    bench: Bench, what: str, layers: _Layers, bare: LowLatency | Normal, tokens: Tokens, phase: str
) -> None:
    """Whole layers, all of which have to have the values of the last: of calls by hand, if there are some."""
    calls: dict[str, _Call] = {name: partial(layer, *tokens, phase=phase) for name, layer in layers.items()}
    calls |= bare.layers()
    outputs = {name: call() for name, call in calls.items()}
    last, reference = outputs.popitem()
    for name, output in outputs.items():
        distance = float((output.double() - reference.double()).norm() / reference.double().norm())
        bench.require(distance < _CLOSE, f"{what}: {name} and {last} differ by {distance}")
        bench.say(f"{what}: {name} has the {'bits' if torch.equal(output, reference) else 'values'} of {last}")
    compare_all(bench, what, calls, waiting(layers, phase))


def compare_all(bench: Bench, what: str, calls: Mapping[str, _Call], not_captured: Collection[str]) -> None:
    """Captured and what the host alone takes, where nothing waits for it; and eager."""
    free = {name: call for name, call in calls.items() if name not in not_captured}
    if free and ON_GPU:
        bench.compare(f"{what}, graph", free, partial(bench.time, capture=True))
    bench.compare(f"{what}, eager", calls, partial(bench.time, capture=False))
    if free:
        bench.compare(f"{what}, host alone", free, bench.issue)
