"""Declarations and hooks of the built-in `torch` plugin. Importing this needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core.activation import ActivationPattern
from moe_core.hookspecs import hookimpl
from moe_core.quant import BF16, FP16, FP32
from moe_core.specs import DispatcherSpec, Limit, PluginSpec, Requirement, RunnerSpec, TokenDtype

if TYPE_CHECKING:
    from moe_core.payloads import ExpertsFn, PreparedWeights, RawWeights
    from moe_core.plan import MoEPlan, Route

WEIGHT_LAYOUT = "canonical"

_FLOATS = (TokenDtype("fp32"), TokenDtype("bf16"), TokenDtype("fp16"))
_WIRE = (*_FLOATS, TokenDtype("fp8", "row_128"))
_FORMATS = ("standard", "contiguous", "masked")
_ACTIVATIONS = (
    ActivationPattern(kind="any", gated=None, parameters=True, interleaved=True),
    ActivationPattern(kind="module", gated=None, parameters=True, interleaved=True),
)


def _local(format_: str) -> DispatcherSpec:
    return DispatcherSpec(
        name="none",
        mode=format_,
        binder=f"moe_core.backends.torch.local:bind_{format_}",
        format=format_,
        sends=_FLOATS,
        token_placements=("replicated",),
        graph_safe=format_ == "standard",
        deterministic=True,
    )


def _alltoall(format_: str) -> DispatcherSpec:
    return DispatcherSpec(
        name="torch_alltoall",
        mode=format_,
        binder=f"moe_core.backends.torch.alltoall:bind_{format_}",
        format=format_,
        sends=_WIRE,
        limits=(Limit("ep_size", ">=", 2, "one rank needs no transport: a2a_backend='none'"),),
        deterministic=True,
    )


def _runner(format_: str) -> RunnerSpec:
    return RunnerSpec(
        name="torch",
        kernel=format_,
        format=format_,
        reads=_FLOATS,
        schemes=(FP32, BF16, FP16),
        activations=_ACTIVATIONS,
        dtypes=("fp32", "bf16", "fp16"),
        weight_layout=WEIGHT_LAYOUT,
        bias=True,
        weight_on_input=True,
        post_norm=True,
        tier="generic" if format_ == "standard" else "reference",
    )


@hookimpl
def declare_backends() -> PluginSpec:
    """Everything that torch alone can do."""
    return PluginSpec(
        name="torch",
        hook_api=1,
        description="torch on any device; torch.distributed as transport",
        dispatchers=[*map(_local, _FORMATS), *map(_alltoall, _FORMATS)],
        runners=[*map(_runner, _FORMATS)],
        requirements=(Requirement(module="torch", minimum="2.10", install="pip install 'torch>=2.10'"),),
    )


@hookimpl
def process_weights_after_loading(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Canonical weights are read as they are."""
    from moe_core.backends.torch.weights import prepare

    return prepare(plan, weights, out)


@hookimpl
def fused_experts(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """Bind the experts of one route."""
    from moe_core.backends.torch.experts import bind

    return bind(plan, route, weights)
