"""Compiling every kernel that a layer's routes through DeepGEMM may need, before the first request.

The library chooses tiles by the number of rows and compiles each choice when it is first met, in some seconds, into its
cache on disk (`DG_JIT_CACHE_DIR`, by default `~/.deep_gemm`), which later processes find. Binding a route compiles one
size, so that a compiler that does not work shows there. This goes through all sizes up to a number of tokens, on rows
of which none exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moe_core.bound import BoundExperts
from moe_core.kernels.permute import max_rows
from moe_core.plan import Route
from moe_core.request import LayerRequest
from moe_plugin_deepgemm.experts import DeepGemmExperts
from moe_plugin_deepgemm.runner_specs import ROW_ALIGNMENT

#: What to expect of an expert is a number of rows: each one up to here, multiples of a tile beyond.
_FEW_ROWS = 128


def warm_up(experts: BoundExperts, max_tokens: int = 8192, progress: Callable[[int, int], None] | None = None) -> None:
    """Compile what forwards of up to `max_tokens` tokens need; layers of the same sizes share their kernels.

    Args:
        experts: The bound layer; routes through other runners are left alone.
        max_tokens: Most tokens that a forward will bring; routes that take fewer are warmed up to their own limit.
        progress: Called with the sizes that are done and the sizes there are, after each.
    """
    request = experts.plan.request
    runs = [
        (bound.experts, size)
        for bound in experts.routes
        if isinstance(bound.experts, DeepGemmExperts)
        for size in row_counts(request, bound.route, min(max_tokens, bound.route.max_tokens or max_tokens))
    ]
    for done, (bound_experts, size) in enumerate(runs, start=1):
        bound_experts.compile(size)
        if progress is not None:
            progress(done, len(runs))


def row_counts(request: LayerRequest, route: Route, max_tokens: int) -> Iterator[int]:
    """The sizes that `DeepGemmExperts.compile` takes, which forwards of up to `max_tokens` tokens may have.

    Rows may come from all ranks.
    """
    num_experts = request.num_slots // request.ep_size
    slots = max_tokens * request.ep_size * min(request.top_k, num_experts)
    if route.runner.spec.format == "contiguous":
        yield from range(ROW_ALIGNMENT, max_rows(slots, num_experts, ROW_ALIGNMENT) + 1, ROW_ALIGNMENT)
        return
    expected = max(1, slots // num_experts)
    yield from range(1, min(expected, _FEW_ROWS) + 1)
    yield from range(2 * _FEW_ROWS, expected + _FEW_ROWS, _FEW_ROWS)
