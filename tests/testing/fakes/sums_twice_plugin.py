"""A plugin whose dispatcher sends over a process group and adds up the ranks' parts twice."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist
import toy_backend as toy

from moe_core.hookspecs import hookimpl
from moe_core.payloads import ExpertGroup
from moe_core.plan import MoEPlan, Route
from moe_core.specs import DispatcherSpec, Limit, PluginSpec

NAME = "sums_twice"


def gathered(tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Every rank's rows, in the order of ranks; shorter ones travel padded."""
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def binder(plan: MoEPlan, route: Route, group: ExpertGroup) -> tuple[Any, Any]:
    def dispatch(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size)]
        dist.all_gather(counts, torch.tensor([len(hidden)]))
        sizes = [int(count) for count in counts]
        everyone = [gathered(tensor, sizes) for tensor in (hidden, ids, weights)]
        tokens, handle = toy.dispatch(plan, group, *everyone)
        return tokens, (handle, sum(sizes[: group.rank]), len(hidden))

    def combine(rows: torch.Tensor, handle: Any) -> torch.Tensor:
        local, start, count = handle
        total = toy.combine(rows, local).float()
        dist.all_reduce(total)
        dist.all_reduce(total)
        return total[start : start + count].to(torch.bfloat16)

    return dispatch, combine


SPEC = toy.specs(NAME, toy.Parts("contiguous"))
SENDING = DispatcherSpec(
    name="toy",
    mode="gather",
    binder=f"{__name__}:binder",
    format="contiguous",
    sends=toy.BF16_TOKENS,
    row_alignment=toy.ALIGNMENT,
    dtypes=("bf16",),
    limits=(Limit("ep_size", ">=", 2),),
    phases=("any",),
)
_HOOKS = toy.hooks_of(NAME, toy.Parts("contiguous"))
process_weights_after_loading = hookimpl(_HOOKS["process_weights_after_loading"])
fused_experts = hookimpl(_HOOKS["fused_experts"])


@hookimpl
def declare_backends() -> PluginSpec:
    return attrs.evolve(SPEC, dispatchers=(*SPEC.dispatchers, SENDING))
