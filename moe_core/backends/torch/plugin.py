"""Declarations and hooks of the built-in `torch` plugin. Importing this needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from moe_core.activation import ActivationPattern
from moe_core.hookspecs import hookimpl
from moe_core.kernels.schemes import EVERY_SCHEME
from moe_core.specs import DispatcherSpec, Limit, PluginSpec, Requirement, RunnerSpec, TokenDtype
from moe_core.vocabulary import CANONICAL

if TYPE_CHECKING:
    from moe_core.payloads import ExpertsFn, PreparedWeights, RawWeights
    from moe_core.plan import MoEPlan, Route

_FLOATS = (TokenDtype("fp32"), TokenDtype("bf16"), TokenDtype("fp16"))
_WIRE = (*_FLOATS, TokenDtype("fp8", "row_128"))
#: What rows grouped by expert may be rounded to on this rank: as grouped GEMMs of 8 bits read them.
CODES = (TokenDtype("fp8", "column_128"), TokenDtype("fp8", "ue8m0_128"))
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
        sends=_FLOATS if format_ == "standard" else (*_FLOATS, *CODES),
        token_placements=("replicated",),
        weight_on_input=True,
        graph_safe=True,
        deterministic=True,
    )


def _alltoall(format_: str) -> DispatcherSpec:
    return DispatcherSpec(
        name="torch_alltoall",
        mode=format_,
        binder=f"moe_core.backends.torch.alltoall:bind_{format_}",
        format=format_,
        sends=_WIRE if format_ == "standard" else _FLOATS,
        weight_on_input=True,
        limits=(Limit("ep_size", ">=", 2, "one rank needs no transport: a2a_backend='none'"),),
        deterministic=True,
    )


def _runner(format_: str) -> RunnerSpec:
    """Everything, everywhere: a CPU loops over the experts that have rows, other devices take groups or blocks."""
    return RunnerSpec(
        name="torch",
        kernel=format_,
        format=format_,
        reads=_FLOATS,
        schemes=(EVERY_SCHEME,),
        activations=_ACTIVATIONS,
        dtypes=("fp32", "bf16", "fp16"),
        weight_layout=CANONICAL,
        bias=True,
        weight_on_input=True,
        post_norm=True,
        graph_safe=True,
        tier=_tier(format_),
    )


def _invariant(format_: str) -> RunnerSpec:
    """The same loop, row by row: a token's bits do not depend on its batch."""
    return attrs.evolve(
        _runner(format_), kernel=f"{format_}_invariant", devices=("cpu",), deterministic=True, tier="reference"
    )


def _tier(format_: str) -> str:
    # Only this format's dispatcher moves nothing.
    return "generic" if format_ == "standard" else "reference"


@hookimpl
def declare_backends() -> PluginSpec:
    """Everything that torch alone can do."""
    return PluginSpec(
        name="torch",
        hook_api=1,
        description="torch on any device; torch.distributed as transport",
        dispatchers=[*map(_local, _FORMATS), *map(_alltoall, _FORMATS)],
        runners=[make(format_) for make in (_runner, _invariant) for format_ in _FORMATS],
        requirements=(Requirement(module="torch", minimum="2.10", install="pip install 'torch>=2.10'"),),
    )


@hookimpl
def process_weights_after_loading(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Canonical weights are read as they are; scales that a whole row shares multiply the outputs."""
    from moe_core.backends.torch.weights import prepare

    return prepare(plan, weights, out)


@hookimpl
def fused_experts(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """Bind the experts of one route."""
    from moe_core.backends.torch.experts import bind

    return bind(plan, route, weights)
