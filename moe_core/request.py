"""What one layer needs, as a value: `eval(repr(request)) == request`, and equal on every rank."""

from __future__ import annotations

import functools
from typing import Any

import attrs

from moe_core.activation import SWIGLU, ActivationSpec
from moe_core.errors import SpecError, counted
from moe_core.placement import ExpertPlacement
from moe_core.quant import WHOLE, LayerQuant, QuantScheme
from moe_core.vocabulary import (
    ANY,
    FLOAT_DTYPES,
    PHASES,
    TOKEN_DTYPES,
    TOKEN_PLACEMENTS,
    as_tuple,
    at_least,
    instance_of,
    one_of,
    require_word,
    tuple_of,
)


def _is_pin(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise SpecError(f"{type(instance).__name__}, field {attribute.name!r}: expected a name or None, got {value!r}")


@attrs.frozen(kw_only=True)
class Workload:
    """One kind of forward that the layer must serve.

    Attributes:
        phase: One of `PHASES`; the name by which the caller picks a route among several.
        max_tokens: Most tokens of one rank in one forward, None if unknown (limits on it then do not apply).
        graph_capture: Whether it will be captured into a device graph.
        down_gemm_overlap: Whether combine is to begin with the first rows of the second projection while it still runs.
        a2a_backend: A pin for this workload alone; overrides the request's.
    """

    phase: str = attrs.field(default=ANY, validator=one_of(*PHASES))
    max_tokens: int | None = attrs.field(default=None, validator=attrs.validators.optional(at_least(1)))
    graph_capture: bool = attrs.field(default=False, validator=instance_of(bool))
    down_gemm_overlap: bool = attrs.field(default=False, validator=instance_of(bool))
    a2a_backend: str | None = attrs.field(default=None, validator=_is_pin)


@attrs.frozen
class Pins:
    """What the user fixed for one workload; None where nothing."""

    a2a: str | None = None
    runner: str | None = None
    dispatch_dtype: str | None = None

    def dropped(self, *fields: str) -> Pins:
        """The same without these fields."""
        return attrs.evolve(self, **dict.fromkeys(fields))

    def __str__(self) -> str:
        """`a2a deepep, runner deep_gemm, dispatch dtype fp8`, or `no pins`."""
        pins = {"a2a": self.a2a, "runner": self.runner, "dispatch dtype": self.dispatch_dtype}
        return ", ".join(f"{kind} {name}" for kind, name in pins.items() if name) or "no pins"


def _default_quant(request: LayerRequest) -> LayerQuant:
    require_word(request.dtype, FLOAT_DTYPES, "LayerRequest, field 'dtype'")
    return LayerQuant.of(QuantScheme.from_name(request.dtype))


def _layer_quant(value: Any) -> Any:
    return LayerQuant.of(value) if isinstance(value, QuantScheme) else value


def _workloads(value: Any) -> Any:
    return (value,) if isinstance(value, Workload) else as_tuple(value)


@attrs.frozen(kw_only=True)
class LayerRequest:
    """One MoE layer. Sizes are the model's; what a rank holds follows from `ep_size` and `tp_size`.

    Attributes:
        num_experts: Experts of the layer, over all ranks.
        top_k: Experts per token.
        hidden_size: H.
        intermediate_size: I, before tensor parallelism.
        activation: What happens between the GEMMs.
        dtype: Dtype of the layer's input and output.
        quant: Scheme of the stored weights; default: unquantized in `dtype`.
        bias: Whether `b13` and `b2` exist.
        weight_on_input: Whether the router weight multiplies the expert's input instead of its output.
        post_norm: Whether a norm follows each expert.
        ep_size: Expert-parallel ranks.
        tp_size: Tensor-parallel ranks; the result is then a partial sum that the caller reduces. Activations of the
            second projection are rounded by the scales of a rank's own channels.
        placement: Which rank owns which expert, and how many copies there are.
        token_placement: `distributed` (each rank brings its own tokens) or `replicated` (every rank of the group has
            all of them and returns its part of the sum).
        workloads: Forwards to serve; each gets a route or several, all share one weight layout. Where a forward does
            not communicate, a phase may occur with several token counts: the smallest that suffices serves.
        deterministic: A token's result must be the same bits whatever else is in the batch.
        a2a_backend: Pin of the dispatcher (bare, `name.mode` or full name).
        runner_backend: Pin of the runner.
        dispatch_dtype: Pin of the dispatch dtype, one of `TOKEN_DTYPES`.
        prefer: Names to rank first, in this order, among what is feasible.
        exclude: Names never to use (plugin, bare or full names).
        allow_fallback: Whether a pin that cannot run may be dropped, as few of them as will do; recorded in the
            decision and warned about.
        strict: Whether documented adjustments of the dispatch dtype are errors.
        bf16_dispatch_variable: Whether the deprecated environment variable asked for bf16; see `deprecated`.
    """

    num_experts: int = attrs.field(validator=at_least(1))
    top_k: int = attrs.field(validator=at_least(1))
    hidden_size: int = attrs.field(validator=at_least(1))
    intermediate_size: int = attrs.field(validator=at_least(1))
    activation: ActivationSpec = attrs.field(default=SWIGLU, validator=instance_of(ActivationSpec))
    dtype: str = attrs.field(default="bf16", validator=one_of(*FLOAT_DTYPES))
    quant: LayerQuant = attrs.field(
        default=attrs.Factory(_default_quant, takes_self=True),
        converter=_layer_quant,
        validator=instance_of(LayerQuant),
    )
    bias: bool = attrs.field(default=False, validator=instance_of(bool))
    weight_on_input: bool = attrs.field(default=False, validator=instance_of(bool))
    post_norm: bool = attrs.field(default=False, validator=instance_of(bool))
    ep_size: int = attrs.field(default=1, validator=at_least(1))
    tp_size: int = attrs.field(default=1, validator=at_least(1))
    placement: ExpertPlacement = attrs.field(default=ExpertPlacement(), validator=instance_of(ExpertPlacement))
    token_placement: str = attrs.field(default="distributed", validator=one_of(*TOKEN_PLACEMENTS))
    workloads: tuple[Workload, ...] = attrs.field(
        default=(Workload(),), converter=_workloads, validator=tuple_of(Workload)
    )
    deterministic: bool = attrs.field(default=False, validator=instance_of(bool))
    a2a_backend: str | None = attrs.field(default=None, validator=_is_pin)
    runner_backend: str | None = attrs.field(default=None, validator=_is_pin)
    dispatch_dtype: str | None = attrs.field(default=None, validator=attrs.validators.optional(one_of(*TOKEN_DTYPES)))
    prefer: tuple[str, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(str))
    exclude: tuple[str, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(str))
    allow_fallback: bool = attrs.field(default=False, validator=instance_of(bool))
    strict: bool = attrs.field(default=False, validator=instance_of(bool))
    bf16_dispatch_variable: bool = attrs.field(default=False, validator=instance_of(bool))

    def __attrs_post_init__(self) -> None:
        """Sizes that contradict each other are refused here, before anything looks at them."""
        if self.top_k > self.num_experts:
            raise self._contradiction("top_k", "num_experts")
        if self.tp_size > self.intermediate_size:
            raise self._contradiction("tp_size", "intermediate_size")
        self.placement.check(self.num_experts)
        self._check_workloads()
        for scheme in (self.quant.w13, self.quant.w2):
            if scheme.is_pattern:
                raise SpecError(f"LayerRequest.quant: {scheme} is a pattern; say what the stored weights are")
            if not scheme.is_quantized and scheme.weight_dtype != self.dtype:
                raise SpecError(
                    f"LayerRequest: dtype {self.dtype} with unquantized {scheme.weight_dtype} weights; "
                    "cast the weights or change dtype, nothing is cast silently"
                )
        self._check_pairs("w13", self.quant.w13, "hidden_size", self.hidden_size)
        self._check_pairs("w2", self.quant.w2, "intermediate_size", self.local_intermediate_size)
        block = self.quant.w13.weight_block
        if self.activation.gated and isinstance(block, tuple) and block[0] == WHOLE != block[1]:
            raise SpecError(
                f"LayerRequest.quant: blocks of all rows and {block[1]} columns would span gate and up, which have "
                f"scales of their own; give w13 blocks of {self.intermediate_size} rows"
            )

    def _check_pairs(self, name: str, scheme: QuantScheme, size: str, channels: int) -> None:
        """4-bit values lie in pairs along a rank's input channels."""
        if scheme.weight_bits == 4 and channels % 2:
            of_rank = f" of one of {self.tp_size} ranks" if self.tp_size > 1 and name == "w2" else ""
            advice = "; choose a tp_size whose shares are even" if of_rank else ""
            raise SpecError(
                f"LayerRequest: {scheme} packs two values to a byte, so {name} cannot have "
                f"{counted(channels, 'input channel')}{of_rank} ({size} {getattr(self, size)}){advice}",
                (size,),
            )

    def _contradiction(self, larger: str, smaller: str) -> SpecError:
        """The error for a size that exceeds another."""
        said = f"{larger} {getattr(self, larger)} exceeds {smaller} {getattr(self, smaller)}"
        return SpecError(f"LayerRequest: {said}", (larger, smaller))

    def _check_workloads(self) -> None:
        """What names a route must tell workloads apart: the phase, and where only local tokens count their number."""
        phases = [workload.phase for workload in self.workloads]
        kinds = phases if self.is_multi_rank else [(w.phase, w.max_tokens) for w in self.workloads]
        if not phases or len(set(kinds)) != len(kinds):
            but = "" if self.is_multi_rank else ", or differ in max_tokens"
            raise SpecError(f"LayerRequest.workloads: phases must be present and distinct{but}; got {kinds}")
        if ANY in phases and set(phases) != {ANY}:
            raise SpecError(f"LayerRequest.workloads: {ANY!r} stands alone, got {phases}")

    @property
    def is_multi_rank(self) -> bool:
        """Whether a forward communicates, so that the phase, never a local token count, picks the route."""
        return self.ep_size > 1 and self.token_placement == "distributed"

    @property
    def local_intermediate_size(self) -> int:
        """I of one tensor-parallel rank; where I does not divide, the last ranks' rows are padded with zeros."""
        return -(-self.intermediate_size // self.tp_size)

    @functools.cached_property
    def local_quant(self) -> LayerQuant:
        """`quant` as one rank holds it: what runners are matched with, and what weights are checked against."""
        halves = 2 if self.activation.gated else 1
        return self.quant.cut(self.local_intermediate_size, halves=halves, tp_size=self.tp_size)

    @property
    def num_slots(self) -> int:
        """Places for experts over all ranks: the experts, and their further copies."""
        return self.placement.num_slots(self.num_experts)

    @property
    def max_local_experts(self) -> int:
        """Most experts that one rank owns, copies counted."""
        return -(-self.num_slots // self.ep_size)

    @property
    def rows_per_token(self) -> float:
        """Rows that an expert gets on average for each token of a rank, if all ranks have as many."""
        return self.ep_size * self.top_k / self.num_slots

    def local_slots(self, rank: int) -> range:
        """The slots of expert-parallel `rank`: the ids by which dispatchers and runners know its experts."""
        return self.placement.local_slots(self.num_experts, self.ep_size, rank)

    def local_experts(self, rank: int) -> tuple[int, ...]:
        """Global ids of the experts that expert-parallel `rank` owns, in the order of its weight rows."""
        return self.placement.local_experts(self.num_experts, self.ep_size, rank)

    def pins(self, workload: Workload) -> Pins:
        """The pins of one workload; its own a2a pin wins over the layer's."""
        return Pins(workload.a2a_backend or self.a2a_backend, self.runner_backend, self.dispatch_dtype)

    def sizes(self, workload: Workload) -> dict[str, int | None]:
        """The sizes that declarations speak about, for one workload."""
        max_tokens, choices = workload.max_tokens, min(self.max_local_experts, self.top_k)
        return {
            "top_k": self.top_k,
            "num_experts": self.num_slots,
            "num_local_experts": self.max_local_experts,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.local_intermediate_size,
            "ep_size": self.ep_size,
            "tp_size": self.tp_size,
            "max_tokens": max_tokens,
            "max_rows": None if max_tokens is None else max_tokens * self.ep_size * choices,
        }
