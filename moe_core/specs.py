"""What a plugin can do, declared as values.

A declaration needs neither torch nor the kernel library: the same specs answer for this machine, for another
one described by hand, and for the conformance kit, which exercises exactly what is declared.
"""

from __future__ import annotations

from typing import Any

import attrs

from moe_core.activation import ActivationPattern
from moe_core.errors import SpecError
from moe_core.quant import LayerQuant
from moe_core.vocabulary import (
    ANY,
    DEVICE_TYPES,
    FLOAT_DTYPES,
    FORMATS,
    ID_SPACES,
    PHASES,
    SCALE_LAYOUTS,
    TIERS,
    TOKEN_DTYPES,
    TOKEN_PLACEMENTS,
    as_sorted_tuple,
    as_tuple,
    at_least,
    each_one_of,
    instance_of,
    one_of,
    require_word,
)

#: The number of the hook interface that this version speaks. Plugins write theirs literally.
HOOK_API = 1


@attrs.frozen
class TokenDtype:
    """What tokens are between dispatch and the experts: element type and scale layout, always compared together.

    Attributes:
        dtype: One of `TOKEN_DTYPES`.
        scales: One of `SCALE_LAYOUTS`; `none` exactly for float tokens.
    """

    dtype: str = attrs.field(validator=one_of(*TOKEN_DTYPES))
    scales: str = attrs.field(default="none", validator=one_of(*SCALE_LAYOUTS))

    def __attrs_post_init__(self) -> None:
        """Floats have no scales, everything else has."""
        if (self.dtype in FLOAT_DTYPES) != (self.scales == "none"):
            raise SpecError(f"TokenDtype: {self.dtype} with scale layout {self.scales!r} does not exist")

    def __str__(self) -> str:
        """`bf16` or `fp8/row_128`."""
        return self.dtype if self.scales == "none" else f"{self.dtype}/{self.scales}"


@attrs.frozen(kw_only=True)
class Requirement:
    """A distribution that a plugin or spec needs, looked up in the environment's package list, never imported.

    Attributes:
        module: Import name, the key of `Environment.packages`.
        minimum: Lowest version, "" for any.
        install: What to type to get it.
    """

    module: str
    minimum: str = ""
    install: str = ""


#: Request sizes that a limit may speak about; `max_tokens` is the workload's maximum per rank.
LIMIT_FIELDS = (
    "top_k",
    "num_experts",
    "num_local_experts",
    "hidden_size",
    "intermediate_size",
    "ep_size",
    "tp_size",
    "max_tokens",
)
LIMIT_RELATIONS = ("<=", ">=", "multiple_of", "in")


@attrs.frozen
class Limit:
    """One size limit of a kernel, as data.

    Attributes:
        field: One of `LIMIT_FIELDS`; `intermediate_size` and `num_local_experts` are per rank.
        relation: `<=`, `>=`, `multiple_of` or `in`.
        value: An int, or a tuple of ints for `in`.
        hint: What to do when the limit is exceeded, for example which version lifts it.
    """

    field: str = attrs.field(validator=one_of(*LIMIT_FIELDS))
    relation: str = attrs.field(validator=one_of(*LIMIT_RELATIONS))
    value: int | tuple[int, ...]
    hint: str = ""

    def __attrs_post_init__(self) -> None:
        """`in` takes a tuple, everything else an int."""
        if isinstance(self.value, tuple) != (self.relation == "in"):
            raise SpecError(f"Limit {self.field} {self.relation}: a wrong kind of value, {self.value!r}")

    def allows(self, size: int) -> bool:
        """Whether `size` keeps the limit."""
        if isinstance(self.value, tuple):
            return size in self.value
        if self.relation == "multiple_of":
            return size % self.value == 0
        return size <= self.value if self.relation == "<=" else size >= self.value

    def __str__(self) -> str:
        """`top_k <= 11`."""
        return f"{self.field} {self.relation} {self.value}"


def _devices(instance: Any, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for device in value:
        require_word(device, (*DEVICE_TYPES, ANY), f"{type(instance).__name__} {instance.name!r}, field 'devices'")


def _not_empty(instance: Any, attribute: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
    if not value:
        raise SpecError(f"{type(instance).__name__} {instance.name!r}, field {attribute.name!r}: must not be empty")


def _layer_patterns(value: Any) -> tuple[LayerQuant, ...]:
    return tuple(LayerQuant.of(pattern) for pattern in as_tuple(value))


@attrs.frozen(kw_only=True)
class DispatcherSpec:
    """Who moves tokens, in one mode.

    Attributes:
        name: The a2a backend name that users pin (`none`, `deepep`, ...); several plugins may share it.
        mode: Distinguishes specs of one name; full name `plugin:name.mode`.
        binder: `package.module:function`, imported when a route is bound; the function is
            `fn(plan, route, group) -> (dispatch, combine)` with the signatures of `payloads`.
        format: Memory layout it writes.
        sends: What it can put on the wire, best first.
        devices: Device types, or ("any",).
        archs: Explicit device generations (`sm90`, `a3`), empty for all of the device types; never a range.
        token_placements: Whether each rank brings its own tokens, or all of them (then the result is this rank's part
            of the sum); one rank alone fits both.
        row_alignment: Rows per expert are padded to a multiple of this; 0 = to whatever the runner asks for.
        id_space: Whether the ids it hands on are local to the rank or global.
        limits: Size limits.
        requirements: Distributions it needs besides the plugin's own.
        phases: Workload phases it serves.
        graph_safe: No host synchronisation and no shape that depends on data.
        deterministic: Equal calls give equal bits.
    """

    name: str
    mode: str
    binder: str = attrs.field()
    format: str = attrs.field(validator=one_of(*(word for word in FORMATS if word != "fused")))
    sends: tuple[TokenDtype, ...] = attrs.field(converter=as_tuple, validator=[_not_empty, instance_of(TokenDtype)])
    devices: tuple[str, ...] = attrs.field(default=(ANY,), converter=as_sorted_tuple, validator=[_not_empty, _devices])
    archs: tuple[str, ...] = attrs.field(default=(), converter=as_sorted_tuple)
    token_placements: tuple[str, ...] = attrs.field(
        default=("distributed",), converter=as_sorted_tuple, validator=[_not_empty, each_one_of(*TOKEN_PLACEMENTS)]
    )
    row_alignment: int = attrs.field(default=0, validator=at_least(0))
    id_space: str = attrs.field(default="local", validator=one_of(*ID_SPACES))
    limits: tuple[Limit, ...] = attrs.field(default=(), converter=as_tuple, validator=instance_of(Limit))
    requirements: tuple[Requirement, ...] = attrs.field(
        default=(), converter=as_tuple, validator=instance_of(Requirement)
    )
    phases: tuple[str, ...] = attrs.field(default=PHASES, converter=as_sorted_tuple, validator=each_one_of(*PHASES))
    graph_safe: bool = False
    deterministic: bool = False

    @binder.validator
    def _check_binder(self, attribute: attrs.Attribute[str], value: str) -> None:
        module, _, function = value.partition(":")
        if not module or not function.isidentifier():
            raise SpecError(
                f"DispatcherSpec {self.name!r}, field 'binder': expected 'package.module:function', got {value!r}"
            )

    @property
    def short_name(self) -> str:
        """`name.mode`."""
        return f"{self.name}.{self.mode}"


@attrs.frozen(kw_only=True)
class RunnerSpec:
    """Who multiplies: one kernel on one format.

    Attributes:
        name: The runner backend name that users pin (`torch`, `deep_gemm`, ...).
        kernel: Distinguishes specs of one name; full name `plugin:name.kernel`.
        format: Memory layout it reads; `fused` does dispatch and combine too and pairs with nothing.
        reads: What it can read from the dispatcher for these schemes, best first.
        schemes: Patterns of `LayerQuant` (a `QuantScheme` stands for both projections).
        activations: Patterns of activation variants.
        dtypes: Layer dtypes, of input and output.
        weight_layout: Tag of the prepared weights; routes of one layer share it.
        a2a: For `fused`: the a2a backend name it answers to.
        devices, archs, token_placements, limits, requirements, phases: As in `DispatcherSpec`.
        bias: Whether expert biases are added.
        weight_on_input: Whether the router weight may act on the input instead of the output.
        post_norm: Whether a norm after each expert can be applied.
        row_alignment: Rows per expert it needs in `contiguous` and `masked`.
        id_space: Ids it reads in `standard` and `fused`.
        graph_safe: No host synchronisation; fixed shapes.
        deterministic: A token's result is the same bits whatever else is in the batch.
        tier: `reference`, `generic`, `tuned` or `fused`; ranks where no measurement does.
    """

    name: str
    kernel: str
    format: str = attrs.field(validator=one_of(*FORMATS))
    reads: tuple[TokenDtype, ...] = attrs.field(converter=as_tuple, validator=[_not_empty, instance_of(TokenDtype)])
    schemes: tuple[LayerQuant, ...] = attrs.field(converter=_layer_patterns, validator=_not_empty)
    activations: tuple[ActivationPattern, ...] = attrs.field(
        converter=as_tuple, validator=[_not_empty, instance_of(ActivationPattern)]
    )
    dtypes: tuple[str, ...] = attrs.field(converter=as_sorted_tuple, validator=[_not_empty, each_one_of(*FLOAT_DTYPES)])
    weight_layout: str
    a2a: str | None = None
    devices: tuple[str, ...] = attrs.field(default=(ANY,), converter=as_sorted_tuple, validator=[_not_empty, _devices])
    archs: tuple[str, ...] = attrs.field(default=(), converter=as_sorted_tuple)
    token_placements: tuple[str, ...] = attrs.field(
        default=TOKEN_PLACEMENTS, converter=as_sorted_tuple, validator=[_not_empty, each_one_of(*TOKEN_PLACEMENTS)]
    )
    bias: bool = False
    weight_on_input: bool = False
    post_norm: bool = False
    row_alignment: int = attrs.field(default=1, validator=at_least(1))
    id_space: str = attrs.field(default="local", validator=one_of(*ID_SPACES))
    limits: tuple[Limit, ...] = attrs.field(default=(), converter=as_tuple, validator=instance_of(Limit))
    requirements: tuple[Requirement, ...] = attrs.field(
        default=(), converter=as_tuple, validator=instance_of(Requirement)
    )
    phases: tuple[str, ...] = attrs.field(default=PHASES, converter=as_sorted_tuple, validator=each_one_of(*PHASES))
    graph_safe: bool = False
    deterministic: bool = False
    tier: str = attrs.field(default="generic", validator=one_of(*TIERS))

    def __attrs_post_init__(self) -> None:
        """A fused runner names its a2a backend, any other has none."""
        if (self.format == "fused") != (self.a2a is not None):
            raise SpecError(f"RunnerSpec {self.name!r}: field 'a2a' goes with format 'fused' and with no other")

    @property
    def short_name(self) -> str:
        """`name.kernel`."""
        return f"{self.name}.{self.kernel}"


@attrs.frozen(kw_only=True)
class PluginSpec:
    """What `declare_backends` returns.

    Attributes:
        name: The plugin's name: its entry point's.
        hook_api: The interface number the plugin was written for, as a literal: an imported constant always matches.
        description: One line for tables.
        dispatchers: Its dispatchers; short names are unique.
        runners: Its runners; short names are unique.
        requirements: Distributions that everything in this plugin needs.
    """

    name: str
    hook_api: int
    description: str = ""
    dispatchers: tuple[DispatcherSpec, ...] = attrs.field(
        default=(), converter=as_tuple, validator=instance_of(DispatcherSpec)
    )
    runners: tuple[RunnerSpec, ...] = attrs.field(default=(), converter=as_tuple, validator=instance_of(RunnerSpec))
    requirements: tuple[Requirement, ...] = attrs.field(
        default=(), converter=as_tuple, validator=instance_of(Requirement)
    )

    def __attrs_post_init__(self) -> None:
        """Short names are unique per kind."""
        for kind, specs in (("dispatcher", self.dispatchers), ("runner", self.runners)):
            names = [spec.short_name for spec in specs]
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise SpecError(f"PluginSpec {self.name!r} declares {kind} {', '.join(repeated)} more than once")


@attrs.frozen
class DeclaredDispatcher:
    """A dispatcher spec and the plugin that declares it."""

    plugin: str
    spec: DispatcherSpec

    @property
    def full_name(self) -> str:
        """`plugin:name.mode`."""
        return f"{self.plugin}:{self.spec.short_name}"


@attrs.frozen
class DeclaredRunner:
    """A runner spec and the plugin that declares it."""

    plugin: str
    spec: RunnerSpec

    @property
    def full_name(self) -> str:
        """`plugin:name.kernel`."""
        return f"{self.plugin}:{self.spec.short_name}"


@attrs.frozen
class Candidate:
    """A dispatcher and a runner that fit each other; a fused runner stands alone (`dispatcher` is None)."""

    dispatcher: DeclaredDispatcher | None
    runner: DeclaredRunner

    @property
    def full_name(self) -> str:
        """`plugin:a2a.mode + plugin:runner.kernel`, or the fused runner's name."""
        return f"{self.dispatcher.full_name} + {self.runner.full_name}" if self.dispatcher else self.runner.full_name

    @property
    def a2a_backend(self) -> str:
        """The a2a backend name of this candidate."""
        return self.dispatcher.spec.name if self.dispatcher else str(self.runner.spec.a2a)


def answers_to(name: str, declared: DeclaredDispatcher | DeclaredRunner) -> bool:
    """Whether `name` (bare, `name.mode`, `plugin:name`, full, or a plugin's name) means this spec."""
    spec = declared.spec
    return name in (spec.name, spec.short_name, f"{declared.plugin}:{spec.name}", declared.full_name)
