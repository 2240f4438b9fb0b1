"""What a plugin can do, declared as values.

A declaration needs neither torch nor the kernel library: the same specs answer for this machine, for another
one described by hand, and for the conformance kit, which exercises exactly what is declared.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs

from moe_core.activation import ActivationPattern
from moe_core.errors import SpecError
from moe_core.quant import LayerQuant, QuantScheme
from moe_core.requirement import Program as Program
from moe_core.requirement import Requirement as Requirement
from moe_core.setting import BufferSize as BufferSize
from moe_core.setting import Setting as Setting
from moe_core.setting import is_variable
from moe_core.vocabulary import (
    ANY,
    CALIBRATED_LAYOUTS,
    DEVICE_TYPES,
    FLOAT_DTYPES,
    FORMATS,
    ID_SPACES,
    LIMIT_FIELDS,
    PHASES,
    SCALE_LAYOUTS,
    TIERS,
    TOKEN_DTYPES,
    TOKEN_PLACEMENTS,
    as_sorted_archs,
    as_sorted_tuple,
    as_tuple,
    at_least,
    each_one_of,
    instance_of,
    is_arch,
    is_device_type,
    is_line,
    is_name,
    one_of,
    tuple_of,
)

#: The number of the hook interface that this version speaks. Plugins write theirs literally.
HOOK_API = 1


@attrs.frozen
class TokenDtype:
    """What tokens are between dispatch and the experts: element type and scale layout, always compared together.

    `block_16_tiled` has the shape of `block_16`, but only contiguous, of 128 rows and 4 scales at least: of an expert's
    `[M, H/16]` scales that of row `m` and group `k` lies at byte
    `((m // 128) * (H / 64) + k // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4`.

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

    @property
    def is_calibrated(self) -> bool:
        """Whether tokens are rounded with a scale that comes with the weights; see `PreparedWeights.token_scale`."""
        return self.scales in CALIBRATED_LAYOUTS

    def __str__(self) -> str:
        """`bf16` or `fp8/row_128`."""
        return self.dtype if self.scales == "none" else f"{self.dtype}/{self.scales}"


LIMIT_RELATIONS = ("<=", ">=", "multiple_of", "in")


@attrs.frozen
class Limit:
    """One size limit of a kernel, as data.

    Attributes:
        field: One of `LIMIT_FIELDS`; `intermediate_size` and `num_local_experts` are per rank.
        relation: `<=`, `>=`, `multiple_of` or `in`.
        value: An int, or a tuple of ints for `in`.
        hint: What to do when the limit is exceeded, for example which version lifts it. Which `tp_size` gives another
            `intermediate_size` is found for each layer, and added.
    """

    field: str = attrs.field(validator=one_of(*LIMIT_FIELDS))
    relation: str = attrs.field(validator=one_of(*LIMIT_RELATIONS))
    value: int | tuple[int, ...]
    hint: str = attrs.field(default="", validator=is_line)

    def __attrs_post_init__(self) -> None:
        """`in` takes a tuple of ints, everything else an int; sizes are at least 1."""
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        is_int = all(type(value) is int for value in values)
        if not is_int or isinstance(self.value, tuple) != (self.relation == "in"):
            wanted = "a tuple of ints" if self.relation == "in" else "an int"
            raise SpecError(f"Limit {self.field} {self.relation}: expected {wanted}, got {self.value!r}")
        if min(values, default=0) < 1:
            raise SpecError(f"Limit {self.field} {self.relation}: expected sizes >= 1, got {self.value!r}")

    def allows(self, size: int) -> bool:
        """Whether `size` keeps the limit."""
        if isinstance(self.value, tuple):
            return size in self.value
        if self.relation == "multiple_of":
            return size % self.value == 0
        return size <= self.value if self.relation == "<=" else size >= self.value

    def __str__(self) -> str:
        """`top_k <= 11`, `ep_size in (2, 4, 8)`."""
        value = f"({', '.join(map(str, self.value))})" if isinstance(self.value, tuple) else self.value
        return f"{self.field} {self.relation} {value}"


def _not_empty(instance: Any, attribute: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
    if not value:
        raise SpecError(f"{type(instance).__name__} {instance.name!r}, field {attribute.name!r}: must not be empty")


def _layer_patterns(value: Any) -> Any:
    patterns = as_tuple(value)
    if not isinstance(patterns, tuple):
        return value
    return tuple(LayerQuant.of(pattern) if isinstance(pattern, QuantScheme) else pattern for pattern in patterns)


@attrs.frozen(kw_only=True)
class _Part:
    """What dispatchers and runners declare alike; documented on both."""

    name: str = attrs.field(validator=is_name)
    devices: tuple[str, ...] = attrs.field(
        default=(ANY,), converter=as_sorted_tuple, validator=[tuple_of(str), is_device_type, _not_empty]
    )
    archs: tuple[str, ...] = attrs.field(default=(), converter=as_sorted_archs, validator=[tuple_of(str), is_arch])
    weight_on_input: bool = attrs.field(default=False, validator=instance_of(bool))
    id_space: str = attrs.field(default="local", validator=one_of(*ID_SPACES))
    limits: tuple[Limit, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(Limit))
    requirements: tuple[Requirement, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(Requirement))
    settings: tuple[Setting, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(Setting))
    buffer_sizes: tuple[BufferSize, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(BufferSize))
    phases: tuple[str, ...] = attrs.field(
        default=PHASES, converter=as_sorted_tuple, validator=[each_one_of(*PHASES), _not_empty]
    )
    graph_safe: bool = attrs.field(default=False, validator=instance_of(bool))
    deterministic: bool = attrs.field(default=False, validator=instance_of(bool))
    down_gemm_overlap: bool = attrs.field(default=False, validator=instance_of(bool))

    @functools.cached_property
    def most_tokens(self) -> int | None:
        """Most tokens per rank by its limits, None if they do not say."""
        bounds = [limit.value for limit in self.limits if (limit.field, limit.relation) == ("max_tokens", "<=")]
        return min((bound for bound in bounds if isinstance(bound, int)), default=None)

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that it speaks about."""
        speaking: tuple[Setting | BufferSize, ...] = (*self.settings, *self.buffer_sizes)
        return tuple(name for each in speaking for name in each.variables)


@attrs.frozen(kw_only=True, cache_hash=True)
class DispatcherSpec(_Part):
    """Who moves tokens, in one mode.

    Attributes:
        name: The a2a backend name that users pin (`none`, `deepep`, ...); several plugins may share it.
        mode: Distinguishes specs of one name; full name `plugin:name.mode`.
        binder: `package.module:function`, imported when a route is bound; the function is
            `fn(plan, route, group) -> (dispatch, combine)` with the signatures of `payloads`, and a `SendFn` behind
            them where tokens can be received later than they are sent. Tokens will come on `group.device`: what a
            forward reads beside them belongs there from the start. Where it sends tokens with a calibrated scale
            (`TokenDtype.is_calibrated`) it is called `fn(plan, route, group, token_scale)`; see
            `PreparedWeights.token_scale`.
        format: Memory layout it writes.
        sends: What it can put on the wire, best first.
        devices: Device types, or ("any",): those of `DEVICE_TYPES`, and those that the plugin names.
        archs: Explicit device generations (`sm90`, `a3`), empty for all of the device types; never a range.
        token_placements: Whether each rank brings its own tokens, or all of them (then the result is this rank's part
            of the sum); one rank alone fits both.
        row_alignment: Rows per expert are padded to a multiple of this; 0 = to whatever the runner asks for.
        id_space: Whether the ids it hands on are local to the rank or global.
        dtypes: Layer dtypes that it can bring back from combine.
        weight_on_input: For `contiguous` and `masked`: whether the router weights may act on the tokens it sends
            instead of on what combine brings back. In `standard` the runner does either.
        limits: Size limits.
        requirements: Distributions it needs besides the plugin's own.
        settings: What environment variables of its libraries must be.
        buffer_sizes: Memory that such variables set, and what a layer needs of it.
        phases: Workload phases it serves.
        graph_safe: No host synchronisation and no shape that depends on data.
        deterministic: Equal calls give equal bits.
        needs_max_tokens: Whether it makes room for all tokens beforehand, so that a workload has to say how many.
        down_gemm_overlap: Whether combine may begin while the second projection runs; its tokens then bring a
            `payloads.DownGemmOverlap` along.
    """

    mode: str = attrs.field(validator=is_name)
    binder: str = attrs.field()
    format: str = attrs.field(validator=one_of(*(word for word in FORMATS if word != "fused")))
    sends: tuple[TokenDtype, ...] = attrs.field(converter=as_tuple, validator=[tuple_of(TokenDtype), _not_empty])
    token_placements: tuple[str, ...] = attrs.field(
        default=("distributed",), converter=as_sorted_tuple, validator=[each_one_of(*TOKEN_PLACEMENTS), _not_empty]
    )
    row_alignment: int = attrs.field(default=0, validator=at_least(0))
    dtypes: tuple[str, ...] = attrs.field(
        default=FLOAT_DTYPES, converter=as_sorted_tuple, validator=[each_one_of(*FLOAT_DTYPES), _not_empty]
    )
    needs_max_tokens: bool = attrs.field(default=False, validator=instance_of(bool))

    @binder.validator
    def _check_binder(self, attribute: attrs.Attribute[str], value: object) -> None:
        module, _, function = value.partition(":") if isinstance(value, str) else ("", "", "")
        if not module or not function.isidentifier():
            raise SpecError(
                f"DispatcherSpec {self.name!r}, field 'binder': expected 'package.module:function', got {value!r}"
            )

    @property
    def short_name(self) -> str:
        """`name.mode`."""
        return f"{self.name}.{self.mode}"


@attrs.frozen(kw_only=True, cache_hash=True)
class RunnerSpec(_Part):
    """Who multiplies: one kernel on one format.

    Attributes:
        name: The runner backend name that users pin (`torch`, `deep_gemm`, ...).
        kernel: Distinguishes specs of one name; full name `plugin:name.kernel`.
        format: Memory layout it reads; `fused` does dispatch and combine too and pairs with nothing.
        reads: What it can read from the dispatcher for these schemes, best first.
        schemes: Patterns of `LayerQuant` (a `QuantScheme` stands for both projections).
        activations: Patterns of activation variants.
        dtypes: Layer dtypes, of input and output.
        weight_layout: Tag of the prepared weights; routes of one layer share it. A tag means one layout in every
            plugin: unless it is `canonical`, begin it with a name of your own.
        a2a: For `fused`: the a2a backend name it answers to.
        devices, archs, token_placements, limits, requirements, settings, buffer_sizes, phases: As in `DispatcherSpec`.
        bias: Whether expert biases are added.
        weight_on_input: Whether the router weight may act on the input instead of the output.
        post_norm: Whether a norm after each expert can be applied.
        down_gemm_overlap: Whether it can tell, while its second projection runs, which rows of it are done; see
            `payloads.DownGemmOverlap`.
        one_input_scale: Whether all experts must have one calibrated input scale per projection, as `load_experts`
            gives them.
        row_alignment: Rows per expert it needs in `contiguous` and `masked`.
        id_space: Ids it reads in `standard` and `fused`.
        graph_safe: No host synchronisation; fixed shapes.
        deterministic: A token's result is the same bits whatever else is in the batch.
        tier: `reference`, `generic`, `tuned` or `fused`; ranks where no measurement does.
        stands_in_for: `name.kernel` of the runner of this plugin whose place it takes where that one is refused, for
            example on weights in a plainer layout. The decision then notes both and why; the order is as without.
    """

    kernel: str = attrs.field(validator=is_name)
    format: str = attrs.field(validator=one_of(*FORMATS))
    reads: tuple[TokenDtype, ...] = attrs.field(converter=as_tuple, validator=[tuple_of(TokenDtype), _not_empty])
    schemes: tuple[LayerQuant, ...] = attrs.field(
        converter=_layer_patterns, validator=[tuple_of(LayerQuant), _not_empty]
    )
    activations: tuple[ActivationPattern, ...] = attrs.field(
        converter=as_tuple, validator=[tuple_of(ActivationPattern), _not_empty]
    )
    dtypes: tuple[str, ...] = attrs.field(converter=as_sorted_tuple, validator=[each_one_of(*FLOAT_DTYPES), _not_empty])
    weight_layout: str = attrs.field(validator=is_name)
    a2a: str | None = attrs.field(default=None, validator=attrs.validators.optional(is_name))
    token_placements: tuple[str, ...] = attrs.field(
        default=TOKEN_PLACEMENTS, converter=as_sorted_tuple, validator=[each_one_of(*TOKEN_PLACEMENTS), _not_empty]
    )
    bias: bool = attrs.field(default=False, validator=instance_of(bool))
    post_norm: bool = attrs.field(default=False, validator=instance_of(bool))
    one_input_scale: bool = attrs.field(default=False, validator=instance_of(bool))
    row_alignment: int = attrs.field(default=1, validator=at_least(1))
    tier: str = attrs.field(default="generic", validator=one_of(*TIERS))
    stands_in_for: str | None = attrs.field(default=None, validator=attrs.validators.optional(instance_of(str)))

    def __attrs_post_init__(self) -> None:
        """A fused runner names its a2a backend, any other has none."""
        if (self.format == "fused") != (self.a2a is not None):
            raise SpecError(f"RunnerSpec {self.name!r}: field 'a2a' goes with format 'fused' and with no other")

    @property
    def short_name(self) -> str:
        """`name.kernel`."""
        return f"{self.name}.{self.kernel}"


@attrs.frozen
class DeviceGeneration:
    """How a device type calls the devices of one generation, where only its plugin knows.

    Attributes:
        device_type: As in `DispatcherSpec.devices`.
        name_prefix: How torch's name of the device begins; the longest that fits counts.
        arch: The generation, as in `archs`.
    """

    device_type: str = attrs.field(validator=is_device_type)
    name_prefix: str = attrs.field(validator=is_line)
    arch: str = attrs.field(validator=is_arch)


@attrs.frozen(kw_only=True, cache_hash=True)
class PluginSpec:
    """What `declare_backends` returns.

    Attributes:
        name: The plugin's name: its entry point's.
        hook_api: The interface number the plugin was written for, as a literal: an imported constant always matches.
        description: One line for tables.
        dispatchers: Its dispatchers; short names are unique.
        runners: Its runners; short names are unique. One that stands in for another names one that is declared here
            and itself stands in for none.
        requirements: Distributions that everything in this plugin needs.
        variables: Environment variables that its libraries read besides those of its parts: recorded with the machine.
        device_types: Types of torch devices that it serves besides `DEVICE_TYPES`, as torch spells them: accelerators
            that bring their own.
        generations: How to tell the generations of a device type whose torch does not say; CUDA's does.
    """

    name: str = attrs.field(validator=is_name)
    hook_api: int = attrs.field(validator=at_least(1))
    description: str = attrs.field(default="", validator=is_line)
    dispatchers: tuple[DispatcherSpec, ...] = attrs.field(
        default=(), converter=as_tuple, validator=tuple_of(DispatcherSpec)
    )
    runners: tuple[RunnerSpec, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(RunnerSpec))
    requirements: tuple[Requirement, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(Requirement))
    variables: tuple[str, ...] = attrs.field(default=(), converter=as_sorted_tuple, validator=is_variable)
    device_types: tuple[str, ...] = attrs.field(
        default=(), converter=as_sorted_tuple, validator=[tuple_of(str), is_device_type]
    )
    generations: tuple[DeviceGeneration, ...] = attrs.field(
        default=(), converter=as_tuple, validator=tuple_of(DeviceGeneration)
    )

    def __attrs_post_init__(self) -> None:
        """Device types are known, short names unique, and what stands in does so for a runner that is there."""
        known = (*DEVICE_TYPES, *self.device_types, ANY)
        places = [(f"{type(part).__name__} {part.name!r}", part.devices) for part in (*self.dispatchers, *self.runners)]
        places += [("DeviceGeneration", (generation.device_type,)) for generation in self.generations]
        for place, devices in places:
            for device in devices:
                if device not in known:
                    raise SpecError(
                        f"{place}: device type {device!r} is not one of {', '.join(known)}; what else torch calls a "
                        "device is named in PluginSpec.device_types"
                    )
        for kind, specs in (("dispatcher", self.dispatchers), ("runner", self.runners)):
            names = [spec.short_name for spec in specs]
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise SpecError(f"PluginSpec {self.name!r} declares {kind} {', '.join(repeated)} more than once")
        usual = [runner.short_name for runner in self.runners if runner.stands_in_for is None]
        for runner in self.runners:
            if runner.stands_in_for not in (None, *usual):
                raise SpecError(
                    f"PluginSpec {self.name!r}: runner {runner.short_name} stands in for {runner.stands_in_for!r}, "
                    f"expected one of its runners that stand in for none: {', '.join(usual) or 'there is none'}"
                )
