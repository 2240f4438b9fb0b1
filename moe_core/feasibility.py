"""Whether a spec fits a request on a machine, and whether two specs fit each other: all reasons, never the first."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import attrs

from moe_core.declared import Candidate, DeclaredSpec, answers_to, belongs_to
from moe_core.environment import Environment
from moe_core.errors import some_of
from moe_core.findings import Reason, SpecReport
from moe_core.quant import SCHEMES, LayerQuant
from moe_core.request import LayerRequest, Pins, Workload
from moe_core.specs import DispatcherSpec, Limit, Requirement, RunnerSpec
from moe_core.vocabulary import ANY

_Spec: TypeAlias = DispatcherSpec | RunnerSpec
#: Most schemes that a reason lists.
_FEW_SCHEMES = 5
#: Most tensor-parallel ranks that a reason thinks of, and how many of their numbers it lists.
_MOST_SPLITS, _FEW_SPLITS = 64, 3
#: Field of a scheme beside the type of its weights -> what it is about.
_PARTS = {
    "weight_block": "blocks",
    "weight_scale": "scales",
    "global_scale": "global scales",
    "zero_point": "zero points",
    "activation_dtype": "activations",
    "activation_scaling": "activations",
    "activation_group": "activations",
    "activation_scale": "activations",
}
#: What the schemes with names are for a layer.
_KNOWN = tuple(LayerQuant.of(scheme) for scheme in SCHEMES.values())


@attrs.frozen
class Case:
    """What specs are held against: a layer, one of its workloads, and a machine."""

    request: LayerRequest
    workload: Workload
    environment: Environment

    @functools.cached_property
    def sizes(self) -> dict[str, int | None]:
        """Name of a size that limits speak about -> the case's, None where it is not known."""
        return self.request.sizes(self.workload)


def report_spec(declared: DeclaredSpec, of_machine: tuple[Reason, ...], case: Case) -> SpecReport:
    """One spec alone; `of_machine` are its `machine_reasons`.

    Of most specs only whether any reason exists is ever asked, so the search for the others waits for who reads them.
    """
    is_refused = next(_spec_reasons(declared, of_machine, case), None) is not None
    return SpecReport(declared, is_refused, functools.partial(_spec_reasons, declared, of_machine, case))


def _spec_reasons(declared: DeclaredSpec, of_machine: tuple[Reason, ...], case: Case) -> Iterator[Reason]:
    """Every reason against one spec alone."""
    spec, request, workload = declared.spec, case.request, case.workload
    yield from _excluded(declared, request)
    yield from of_machine
    yield from _workload_reasons(spec, request, workload)
    yield from _limit_reasons(spec, case)
    yield from _buffer_reasons(spec, case)
    if isinstance(spec, RunnerSpec):
        yield from _runner_reasons(spec, request)
    else:
        yield from _dispatcher_reasons(spec, request, workload)
    if isinstance(spec, DispatcherSpec) or spec.format == "fused":
        yield from _token_reasons(spec, request)


def machine_reasons(
    spec: _Spec,
    requirements: tuple[Requirement, ...],
    environment: Environment,
) -> tuple[Reason, ...]:
    """The reasons against one spec that hold for every layer: packages, programs, device type, generation, settings."""
    return (
        *_requirement_reasons((*requirements, *spec.requirements), environment),
        *_device_reasons(spec, environment),
        *_setting_reasons(spec, environment),
    )


def pair_reasons(candidate: Candidate, request: LayerRequest) -> tuple[Reason, ...]:
    """Every reason why a dispatcher and a runner that both passed do not fit each other, but for the dtype."""
    if candidate.dispatcher is None:
        return ()
    dispatcher, runner = candidate.dispatcher.spec, candidate.runner.spec
    if not candidate.has_one_format:
        return (Reason("format", f"{runner.format} tokens", f"{dispatcher.format} tokens"),)
    reasons = []
    if dispatcher.row_alignment % runner.row_alignment:
        needs = f"rows per expert in multiples of {runner.row_alignment}"
        reasons.append(Reason("alignment", needs, f"multiples of {dispatcher.row_alignment}"))
    if runner.format == "standard" and dispatcher.id_space != runner.id_space and request.ep_size > 1:
        reasons.append(Reason("format", f"{runner.id_space} expert ids", f"{dispatcher.id_space} expert ids"))
    return tuple(reasons)


def pin_reasons(candidate: Candidate, pins: Pins) -> tuple[Reason, ...]:
    """Why a pair is not the one that was pinned; the dispatch dtype's pin has its own rules."""
    reasons = []
    dispatcher = candidate.dispatcher
    hint = "" if dispatcher else f"{candidate.runner.spec.short_name} moves tokens itself: it has no dispatcher"
    is_a2a = pins.a2a is None or pins.a2a == candidate.a2a_backend
    if not is_a2a and not (dispatcher is not None and answers_to(str(pins.a2a), dispatcher)):
        reasons.append(Reason("pin", f"a2a backend {pins.a2a}", candidate.a2a_backend, hint))
    if pins.runner is not None and not answers_to(pins.runner, candidate.runner):
        reasons.append(Reason("pin", f"runner backend {pins.runner}", candidate.runner.spec.name, hint))
    return tuple(reasons)


def _excluded(declared: DeclaredSpec, request: LayerRequest) -> Iterator[Reason]:
    for name in dict.fromkeys(request.exclude):
        if belongs_to(name, declared):
            yield Reason("excluded", "not to be excluded", f"exclude={name!r}", f"leave exclude={name!r} out")


def _requirement_reasons(requirements: tuple[Requirement, ...], environment: Environment) -> Iterator[Reason]:
    for index, requirement in enumerate(requirements):
        if requirement in requirements[:index]:
            continue
        found = environment.version(requirement.module)
        if found is None:
            yield Reason("package", str(requirement), "not installed", requirement.install)
        elif not requirement.is_met_by(found):
            version = found or "of unknown version"
            yield Reason("version", str(requirement), f"{requirement.module} {version}", requirement.install)
        else:
            yield from _program_reasons(requirement, environment)


def _program_reasons(requirement: Requirement, environment: Environment) -> Iterator[Reason]:
    paths, variables = dict(environment.programs), dict(environment.variables)
    for program in requirement.programs:
        # What nobody looked for may be there.
        if program.is_needed(variables) and paths.get(program.name) == "":
            yield Reason("program", f"{program.name} for {requirement.module}", "none", program.install)


def _device_reasons(spec: _Spec, environment: Environment) -> Iterator[Reason]:
    if ANY not in spec.devices and environment.device_type not in spec.devices:
        yield Reason("device", " or ".join(spec.devices), environment.device_type)
    if spec.archs and environment.arch not in spec.archs:
        yield Reason("arch", " or ".join(spec.archs), environment.arch or "no device generation")


def _setting_reasons(spec: _Spec, environment: Environment) -> Iterator[Reason]:
    for setting in spec.settings:
        if fault := setting.fault(dict(environment.variables)):
            yield Reason("variable", *fault, setting.hint)


def _buffer_reasons(spec: _Spec, case: Case) -> Iterator[Reason]:
    # What depends on how many tokens come at a time.
    fewer = "send fewer tokens at a time" if case.workload.max_tokens else "declare Workload(max_tokens=...)"
    for buffer_size in spec.buffer_sizes:
        # A workload that does not say how many tokens it has may bring what the spec takes.
        workload = case.workload
        most = workload if workload.max_tokens else attrs.evolve(workload, max_tokens=spec.most_tokens)
        if fault := buffer_size.fault(dict(case.environment.variables), case.request.sizes(most)):
            hints = (buffer_size.hint, fewer if buffer_size.follows_tokens else "")
            yield Reason("variable", *fault, ", or ".join(filter(None, hints)))


def _workload_reasons(spec: _Spec, request: LayerRequest, workload: Workload) -> Iterator[Reason]:
    if ANY not in spec.phases and workload.phase not in spec.phases:
        yield Reason("phase", " or ".join(spec.phases), workload.phase)
    if workload.graph_capture and not spec.graph_safe:
        yield Reason("graph", "a graph-safe backend", "one that synchronises with the host or has shapes from data")
    if workload.down_gemm_overlap and not spec.down_gemm_overlap:
        needs = "no combine before the second projection ends"
        yield Reason("overlap", needs, "down_gemm_overlap=True", "leave down_gemm_overlap out of the workload")
    if request.deterministic and not spec.deterministic:
        yield Reason("determinism", "bitwise repeatable results", "not declared deterministic")


def _limit_reasons(spec: _Spec, case: Case) -> Iterator[Reason]:
    for limit in spec.limits:
        size = case.sizes[limit.field]
        if size is not None and not limit.allows(size):
            hint = "; or ".join(filter(None, (limit.hint, _other_split(limit, case.request))))
            yield Reason("limit", str(limit), f"{limit.field} {size}", hint, limit.field)


def _other_split(limit: Limit, request: LayerRequest) -> str:
    """`tp_size 1, 2 fit`: even splits, next to the layer's, whose share keeps the limit; "" if there is none."""
    if limit.field != "intermediate_size":
        return ""
    whole, asked = request.intermediate_size, request.tp_size
    splits = (tp for tp in range(1, min(whole, _MOST_SPLITS) + 1) if whole % tp == 0 and tp != asked)
    fitting = sorted((tp for tp in splits if limit.allows(whole // tp)), key=lambda tp: max(tp, asked) / min(tp, asked))
    named = ", ".join(map(str, sorted(fitting[:_FEW_SPLITS])))
    return f"tp_size {named} {'fits' if len(fitting) == 1 else 'fit'}" if fitting else ""


def _dispatcher_reasons(spec: DispatcherSpec, request: LayerRequest, workload: Workload) -> Iterator[Reason]:
    if spec.needs_max_tokens and workload.max_tokens is None:
        yield Reason("limit", "max_tokens", "any number of tokens", "declare Workload(max_tokens=...)", "max_tokens")
    if request.dtype not in spec.dtypes:
        yield Reason("dtype", f"layer dtype {' or '.join(spec.dtypes)}", request.dtype)
    if request.weight_on_input and spec.format != "standard" and not spec.weight_on_input:
        yield Reason("weighting", "router weights on the output", "router weights on the input")


@functools.lru_cache(maxsize=1024)
def _scheme_reason(runner: RunnerSpec, quant: LayerQuant) -> Reason | None:
    """Why none of a runner's patterns is this scheme, None if one is; the layers of a model share few schemes."""
    if any(quant.matches(pattern) for pattern in runner.schemes):
        return None
    return Reason("scheme", nearest_schemes(runner.schemes, quant), str(quant), _what_differs(runner.schemes, quant))


def _what_differs(patterns: tuple[LayerQuant, ...], quant: LayerQuant) -> str:
    """What of a scheme is not computed beside weights of its types, "" where these are not computed at all."""
    differing = (quant.differing(pattern) for pattern in patterns)
    like_it = [fields for fields in differing if "weight_dtype" not in fields]
    if not like_it:
        return ""
    nearest = min(like_it, key=lambda fields: (len(fields), sorted(fields)))
    words = dict.fromkeys(word for field, word in _PARTS.items() if field in nearest)
    types = " and ".join(dict.fromkeys((quant.w13.weight_dtype, quant.w2.weight_dtype)))
    return f"{types} weights are computed, but with other {' and '.join(words)}"


def nearest_schemes(patterns: Sequence[LayerQuant], quant: LayerQuant) -> str:
    """The schemes to name: all of a few, of many those that have names and differ least from what is asked."""
    named = [known for known in _KNOWN if any(known.matches(pattern) for pattern in patterns)]
    unnamed = [pattern for pattern in patterns if not any(known.matches(pattern) for known in named)]
    names = [str(scheme) for schemes in (named, unnamed) for scheme in sorted(schemes, key=quant.distance)]
    if len(names) <= _FEW_SCHEMES:
        return " or ".join(names)
    return f"one of {some_of(names, _FEW_SCHEMES)}"


def _runner_reasons(spec: RunnerSpec, request: LayerRequest) -> Iterator[Reason]:
    quant = request.local_quant
    if (reason := _scheme_reason(spec, quant)) is not None:
        yield reason
    if request.deterministic and (quant.w13.scales_by_batch or quant.w2.scales_by_batch):
        yield Reason("determinism", "activation scales of single tokens", "one scale for all rows of a batch")
    if not any(pattern.matches(request.activation) for pattern in spec.activations):
        yield Reason("activation", " or ".join(map(str, spec.activations)), str(request.activation))
    if request.dtype not in spec.dtypes:
        yield Reason("dtype", f"layer dtype {' or '.join(spec.dtypes)}", request.dtype)
    if request.bias and not spec.bias:
        yield Reason("bias", "a layer without expert biases", "expert biases")
    if request.weight_on_input and not spec.weight_on_input:
        yield Reason("weighting", "router weights on the output", "router weights on the input")
    if request.post_norm and not spec.post_norm:
        yield Reason("post-norm", "no norm after each expert", "a norm after each expert")


def _token_reasons(spec: _Spec, request: LayerRequest) -> Iterator[Reason]:
    # One rank alone has all tokens and its own share at the same time.
    if request.ep_size > 1 and request.token_placement not in spec.token_placements:
        hint = f"say token_placement={spec.token_placements[0]!r} if that is how tokens lie"
        yield Reason("tokens", f"{' or '.join(spec.token_placements)} tokens", request.token_placement, hint)
