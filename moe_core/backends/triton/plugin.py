"""Declarations and hooks of the built-in `triton` plugin. Importing this needs neither torch nor Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from moe_core.activation import ActivationPattern
from moe_core.backends.torch.plugin import CODES
from moe_core.backends.triton.schemes import IN_PANELS, SUPPORTED
from moe_core.hookspecs import hookimpl
from moe_core.specs import DispatcherSpec, Limit, PluginSpec, Requirement, RunnerSpec, TokenDtype
from moe_core.vocabulary import CANONICAL

if TYPE_CHECKING:
    from moe_core.payloads import ExpertsFn, FusedFn, PreparedWeights, RawWeights
    from moe_core.plan import MoEPlan, Route

_FORMATS = ("standard", "contiguous", "masked")
_FLOATS = ("bf16", "fp16")
_ACTIVATIONS = (
    ActivationPattern(kind="any", gated=None, parameters=True, interleaved=True),
    ActivationPattern(kind="module", gated=None, parameters=True, interleaved=True),
)
#: Where tiles were measured and tests ran.
_MEASURED_ARCHS = ("sm90",)
_OTHER_ARCHS = ("sm80", "sm86", "sm89", "sm100", "sm103", "sm120")
#: What all of them multiply: the older ones have no e4m3, neither as weights nor as scales.
_OTHER_DTYPES = ("bf16", "fp16", "int8", "int4")
#: Layout tag of weights in panels (`moe_core.kernels.panels`).
_PANELS = "triton_panels"


def _runner(format_: str) -> RunnerSpec:
    return RunnerSpec(
        name="triton",
        kernel=format_,
        format=format_,
        reads=tuple(map(TokenDtype, _FLOATS)),
        schemes=SUPPORTED,
        activations=_ACTIVATIONS,
        dtypes=_FLOATS,
        devices=("cuda",),
        archs=_MEASURED_ARCHS,
        # The same canonical weights that the torch runners read.
        weight_layout=CANONICAL,
        # Rows of 16 bytes for the copies into shared memory.
        limits=(Limit("hidden_size", "multiple_of", 16), Limit("intermediate_size", "multiple_of", 16)),
        bias=True,
        weight_on_input=True,
        post_norm=True,
        graph_safe=True,
        # In the other formats the rows are gathered before; this one's GEMM gathers them itself.
        tier="tuned" if format_ == "standard" else "generic",
    )


def _peer_memory(format_: str) -> DispatcherSpec:
    """Every rank has a place for each token of each rank, and for its sum."""
    floats = tuple(map(TokenDtype, _FLOATS))
    return DispatcherSpec(
        name="peer_memory",
        mode=format_,
        binder=f"moe_core.backends.triton.peer_memory:bind_{format_}",
        format=format_,
        sends=floats if format_ == "standard" else (*floats, *CODES),
        dtypes=_FLOATS,
        devices=("cuda",),
        archs=_MEASURED_ARCHS,
        weight_on_input=True,
        limits=(
            Limit("ep_size", "in", tuple(range(2, 9)), "one rank needs no transport; several hosts: torch_alltoall"),
            Limit("max_tokens", "<=", 8192, "send the tokens in chunks"),
        ),
        graph_safe=True,
        deterministic=True,
        needs_max_tokens=True,
    )


def _fused() -> RunnerSpec:
    """The standard runner without a dispatcher in front: on one rank there is nothing to send."""
    base = _runner("standard")
    alone = Limit("ep_size", "<=", 1, "several ranks: runner triton.standard behind a dispatcher")
    return attrs.evolve(
        base,
        kernel="fused",
        format="fused",
        a2a="none",
        token_placements=("distributed", "replicated"),
        limits=(*base.limits, alone),
        tier="fused",
    )


def _in_panels(runner: RunnerSpec) -> RunnerSpec:
    """The same kernels on weights in panels, which tiles read in longer stretches; they are a copy of the raw ones."""
    return attrs.evolve(
        runner,
        kernel=f"{runner.kernel}_panels",
        schemes=IN_PANELS,
        weight_layout=_PANELS,
        # Whole panels of 8-bit numbers.
        limits=(*runner.limits, *(Limit(size, "multiple_of", 128) for size in ("hidden_size", "intermediate_size"))),
        # Where nothing was measured, weights are borrowed as they are.
        tier="tuned" if runner.tier == "fused" else "generic",
    )


def _untuned(runner: RunnerSpec) -> RunnerSpec:
    """The same kernels on other generations, with tiles that were chosen elsewhere."""
    schemes = tuple(scheme for scheme in runner.schemes if scheme.w13.weight_dtype in _OTHER_DTYPES)
    tier = "reference" if runner.tier == "generic" else "generic"
    return attrs.evolve(runner, kernel=f"{runner.kernel}_untuned", archs=_OTHER_ARCHS, schemes=schemes, tier=tier)


@hookimpl
def declare_backends() -> PluginSpec:
    """Everything that the kernels in `moe_core.kernels.triton` can do."""
    runners = [*map(_runner, _FORMATS), _fused()]
    in_panels = [_in_panels(runner) for runner in runners if runner.format in ("standard", "fused")]
    return PluginSpec(
        name="triton",
        hook_api=1,
        description="grouped GEMMs in Triton, on tokens as they come; tokens between the GPUs of one host",
        dispatchers=[*map(_peer_memory, _FORMATS)],
        runners=[*runners, *in_panels, *map(_untuned, runners)],
        requirements=(
            Requirement(module="torch", minimum="2.10", install="pip install 'torch>=2.10'"),
            Requirement(module="triton", minimum="3.6", install="pip install 'triton>=3.6' (comes with torch on CUDA)"),
        ),
    )


@hookimpl
def process_weights_after_loading(plan: MoEPlan, weights: RawWeights, out: PreparedWeights | None) -> PreparedWeights:
    """Canonical weights are read as they are; panels are copies."""
    from moe_core.backends.triton.weights import check_scales

    check_scales(weights.tensors, plan.request.local_quant, plan.request.dtype)
    if plan.weight_layout == _PANELS:
        from moe_core.backends.triton.panels import prepare
    else:
        # A layout tag means one layout in every plugin, and this one has its making there.
        from moe_core.backends.torch.weights import prepare
    return prepare(plan, weights, out)


@hookimpl
def fused_experts(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn | FusedFn:
    """Bind the experts of one route."""
    from moe_core.backends.triton.experts import bind

    return bind(plan, route, weights)
