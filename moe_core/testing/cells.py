"""What a plugin declares, cell by cell: who moves tokens, who multiplies, and what the layer is.

Every declared pair, dispatch dtype, scheme, activation and layer dtype occurs. Patterns with `any` stand for
representatives, so that the number of cells stays bounded; phases, biases, norms and weighting vary one at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import attrs

from moe_core.activation import ACTIVATION_KINDS, SWIGLU_OAI, ActivationPattern, ActivationSpec
from moe_core.declared import Candidate
from moe_core.dispatch_dtype import candidates
from moe_core.errors import SpecError
from moe_core.quant import SCHEMES, WHOLE, LayerQuant, QuantScheme
from moe_core.quant.scheme import ACTIVATION_DTYPES, ACTIVATION_SCALING, SCALE_DTYPES, WEIGHT_DTYPES
from moe_core.request import LayerRequest, Workload
from moe_core.specs import Limit, TokenDtype
from moe_core.testing.sizes import Sizes, base_sizes
from moe_core.vocabulary import ANY, PHASES

#: What a layer may have besides; the field of a runner's spec, and of the request.
FEATURES = ("bias", "weight_on_input", "post_norm")
#: What a workload says where it has to say how many tokens there are at most, and a dispatcher takes any number.
_MOST_TOKENS = 512
#: Token dtypes of four bits.
_PACKED = ("int4", "nvfp4", "mxfp4")


@attrs.frozen(kw_only=True)
class Cell:
    """One thing that a plugin says it can do.

    Attributes:
        pair: The dispatcher (None for a fused runner) and the runner.
        token_dtype: The dtype in which tokens reach the runner, None if the two share none.
        quant: The schemes of the stored weights.
        activation: The activation variant.
        dtype: The layer's dtype.
        phase: The workload's phase.
        feature: One of `FEATURES`, or "".
        ep_size: Expert-parallel ranks.
        token_placement: Where a rank's tokens are.
    """

    pair: Candidate
    token_dtype: TokenDtype | None
    quant: LayerQuant
    activation: ActivationSpec
    dtype: str
    phase: str = ANY
    feature: str = ""
    ep_size: int = 1
    token_placement: str = "distributed"

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits of both specs, that packed tokens come in pairs, and a bound where a dispatcher needs any."""
        dispatcher = self.pair.dispatcher
        is_packed = self.token_dtype is not None and self.token_dtype.dtype in _PACKED
        packing = (Limit("hidden_size", "multiple_of", 2),) if is_packed else ()
        is_unbounded = dispatcher is not None and dispatcher.spec.needs_max_tokens and not dispatcher.spec.most_tokens
        bound = (Limit("max_tokens", "<=", _MOST_TOKENS),) if is_unbounded else ()
        return (*packing, *bound, *(dispatcher.spec.limits if dispatcher else ()), *self.pair.runner.spec.limits)

    @property
    def format(self) -> str:
        """How tokens lie between the two."""
        return self.pair.runner.spec.format

    def base_sizes(self) -> Sizes:
        """The sizes that most checks use."""
        return base_sizes(self.quant, self.limits, self.ep_size)

    def request(self, sizes: Sizes, **changes: object) -> LayerRequest:
        """The request that only this cell serves."""
        dispatcher = self.pair.dispatcher
        fields: dict[str, object] = {
            "num_experts": sizes.num_experts,
            "top_k": sizes.top_k,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "activation": self.activation,
            "dtype": self.dtype,
            "quant": self.quant,
            "ep_size": self.ep_size,
            "token_placement": self.token_placement,
            "workloads": (Workload(phase=self.phase, max_tokens=sizes.max_tokens),),
            "a2a_backend": dispatcher.full_name if dispatcher else None,
            "runner_backend": self.pair.runner.full_name,
            "dispatch_dtype": self.token_dtype.dtype if self.token_dtype else None,
            **({self.feature: True} if self.feature else {}),
        }
        return LayerRequest(**(fields | changes))  # type: ignore[arg-type]

    def __str__(self) -> str:
        """`torch:none.masked + torch:torch.masked, bf16, fp8_block128, silu-gated`."""
        parts = [self.pair.full_name, self.dtype, str(self.quant), str(self.activation)]
        if self.token_dtype is not None and str(self.token_dtype) != self.dtype:
            parts.append(f"tokens {self.token_dtype}")
        parts += [self.phase] if self.phase != ANY else []
        parts += [self.feature] if self.feature else []
        return ", ".join(parts)


def cells_of(pair: Candidate, ep_size: int = 1, quick: bool = False) -> list[Cell]:
    """The cells of one pair, the plainest first.

    Args:
        pair: A dispatcher and a runner of one format, or a fused runner.
        ep_size: Expert-parallel ranks.
        quick: Vary scheme, activation and layer dtype one at a time, instead of trying all with all.
    """
    runner, dispatcher = pair.runner.spec, pair.dispatcher.spec if pair.dispatcher else None
    # Half precision first: it is what layers use.
    dtypes = sorted(runner.dtypes, key=("bf16", "fp16", "fp32").index)
    activations = list(dict.fromkeys(a for pattern in runner.activations for a in activations_of(pattern)))
    schemes = {scheme: is_named for pattern in runner.schemes for scheme, is_named in schemes_of(pattern).items()}
    found: list[Cell] = []
    for dtype, (scheme, is_named) in itertools.product(dtypes, schemes.items()):
        if not _fits_dtype(scheme, dtype):
            continue
        plain = Cell(
            pair=pair,
            token_dtype=None,
            quant=scheme,
            activation=activations[0],
            dtype=dtype,
            phase=_phases(pair)[0],
            ep_size=ep_size,
        )
        if quick and found and dtype != dtypes[0] and scheme.is_quantized:
            continue
        with_all = is_named and not (quick and found)
        found += [
            attrs.evolve(plain, token_dtype=token, activation=activation)
            for token in candidates(plain.request(_ANY_SIZES), dispatcher, runner) or (None,)
            for activation in (activations if with_all else activations[:1])
        ]
    return [*found, *_variants(found[0])] if found else []


#: Any layer; dispatch dtypes do not depend on sizes.
_ANY_SIZES = Sizes(num_experts=2, top_k=1, hidden_size=2, intermediate_size=2, max_tokens=None)


def _phases(pair: Candidate) -> list[str]:
    """Phases that both parts serve; a part that serves `any` serves all."""
    parts = [part.spec for part in (pair.dispatcher, pair.runner) if part is not None]
    return [phase for phase in PHASES if all(ANY in part.phases or phase in part.phases for part in parts)] or [ANY]


def _variants(cell: Cell) -> Iterator[Cell]:
    """The first cell of a pair in every other phase, and with every declared feature."""
    yield from (attrs.evolve(cell, phase=phase) for phase in _phases(cell.pair)[1:])
    for feature in FEATURES:
        if _has(cell.pair, feature):
            yield attrs.evolve(cell, feature=feature)


def _has(pair: Candidate, feature: str) -> bool:
    dispatcher = pair.dispatcher
    if feature == "weight_on_input" and dispatcher is not None and dispatcher.spec.format != "standard":
        # It applies the weights before the runner sees a row.
        return dispatcher.spec.weight_on_input and pair.runner.spec.weight_on_input
    return bool(getattr(pair.runner.spec, feature))


def _fits_dtype(quant: LayerQuant, dtype: str) -> bool:
    return all(scheme.is_quantized or scheme.weight_dtype == dtype for scheme in (quant.w13, quant.w2))


def activations_of(pattern: ActivationPattern) -> list[ActivationSpec]:
    """Representatives of a pattern: every kind, gated or not, and one of each further freedom."""
    kinds = [k for k in ACTIVATION_KINDS if k != "module"] if pattern.kind == ANY else [pattern.kind]
    gated = (True, False) if pattern.gated is None else (pattern.gated,)
    found = [ActivationSpec(kind=kind, gated=is_gated) for kind in kinds for is_gated in gated]
    if True in gated and pattern.parameters and pattern.kind != "module":
        alpha = 1.25 if kinds[0] == "silu" else 1.0
        found.append(ActivationSpec(kind=kinds[0], alpha=alpha, limit=1.5, beta=0.5))
        found.append(ActivationSpec(kind=kinds[0], limit=1.5, clamp="after"))
        found += [SWIGLU_OAI] if kinds[0] == "silu" else []
    if True in gated and pattern.interleaved:
        found.append(ActivationSpec(kind=kinds[0], row_order="interleaved"))
    return [activation for activation in found if pattern.matches(activation)]


def schemes_of(pattern: LayerQuant) -> dict[LayerQuant, bool]:
    """Representatives of a pattern -> whether they are schemes by themselves.

    They are the named schemes that it covers; of a pattern with `any` block also what a rank's cut makes of them.
    """
    if not (pattern.w13.is_pattern or pattern.w2.is_pattern):
        return {pattern: True}
    named = [
        LayerQuant(w13, w2)
        for w13 in _named(pattern.w13)
        for w2 in _named(pattern.w2)
        if pattern.w13 != pattern.w2 or w13 == w2
    ]
    # One of each element type: what a cut does to tiles does not depend on the rest of the scheme.
    cut: dict[str, LayerQuant] = {}
    for quant in named if pattern.w13.weight_block == ANY else ():
        smaller = quant.cut(_CUT_SIZE, halves=2, tp_size=2)
        if smaller != quant and smaller.matches(pattern):
            cut.setdefault(quant.w13.weight_dtype, smaller)
    return {**dict.fromkeys(named, True), **dict.fromkeys(cut.values(), False)}


#: A rank's share that ends inside the blocks of every named scheme.
_CUT_SIZE = 24


def _named(pattern: QuantScheme) -> list[QuantScheme]:
    if not pattern.is_pattern:
        return [pattern]
    return [scheme for scheme in SCHEMES.values() if scheme.matches(pattern)] or list(
        itertools.islice(_made(pattern), 1)
    )


def _made(pattern: QuantScheme) -> Iterator[QuantScheme]:
    """Valid schemes of a pattern that covers no named one."""
    choices: dict[str, Iterable[object]] = {
        "weight_dtype": WEIGHT_DTYPES,
        "weight_block": (None, (1, WHOLE), (1, 32), (128, 128)),
        "weight_scale": SCALE_DTYPES,
        "global_scale": (False, True),
        "zero_point": (False, True),
        "activation_dtype": ACTIVATION_DTYPES,
        "activation_scaling": ACTIVATION_SCALING,
        "activation_group": (WHOLE, 32, 128),
        "activation_scale": SCALE_DTYPES,
    }
    fixed = {name: getattr(pattern, name) for name in choices}
    options = [choices[name] if value == ANY else (value,) for name, value in fixed.items()]
    for values in itertools.product(*options):
        try:
            yield QuantScheme(**dict(zip(fixed, values, strict=True)))
        except SpecError:
            continue
