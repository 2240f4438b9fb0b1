"""A plugin with a dispatcher whose combine begins while the second projection runs, and waits for signals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_core.hookspecs import hookimpl
from moe_core.specs import DispatcherSpec, PluginSpec, TokenDtype

if TYPE_CHECKING:
    from moe_core.payloads import ExpertGroup, Tensor
    from moe_core.plan import MoEPlan, Route

#: Multiprocessors that are left to the second projection.
MULTIPROCESSORS = 5
#: What happened in the last forward, in order.
EVENTS: list[str] = []


@hookimpl
def declare_backends() -> PluginSpec:
    """Blocks of rows of bf16."""
    early = DispatcherSpec(
        name="early",
        mode="masked",
        binder=f"{__name__}:bind",
        format="masked",
        sends=(TokenDtype("bf16"),),
        token_placements=("replicated",),
        down_gemm_overlap=True,
    )
    return PluginSpec(name="early_combine", hook_api=1, dispatchers=(early,))


def bind(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[Any, Any]:
    """The built-in dispatch with something to tell which experts are done."""
    import attrs
    import torch

    from moe_core.backends.torch import local
    from moe_core.payloads import DownGemmOverlap

    send, combine = local.bind_masked(plan, route, group)

    def dispatch(*tokens: Tensor) -> tuple[Any, Any]:
        EVENTS[:] = ["dispatch"]
        dispatched, handle = send(*tokens)
        overlap = None
        if route.down_gemm_overlap:
            signals = torch.zeros(dispatched.masked_m.shape[0], dtype=torch.int32)
            overlap = DownGemmOverlap(
                signals=signals, num_multiprocessors=MULTIPROCESSORS, start=lambda: EVENTS.append("start")
            )
        return attrs.evolve(dispatched, down_gemm_overlap=overlap), (handle, overlap)

    def wait_and_combine(rows: Tensor, handle: Any) -> Tensor:
        inner, overlap = handle
        if overlap is not None:
            EVENTS.append(f"signals {overlap.signals.tolist()}")
        return combine(rows, inner)

    return dispatch, wait_and_combine
