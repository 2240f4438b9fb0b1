"""What must hold for any declarations, any request and any machine: 20,000 random triples of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import attrs
from fakes import dispatcher, expect, plugin, runner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_core.activation import ActivationPattern, ActivationSpec
from moe_core.decision import Decision
from moe_core.declared import DeclaredDispatcher, DeclaredRunner
from moe_core.environment import Environment
from moe_core.findings import Reason
from moe_core.quant import BF16, FP8_BLOCK128, FP16, W8A8_INT8
from moe_core.request import LayerRequest, Workload
from moe_core.resolver import resolve
from moe_core.specs import Limit, PluginSpec, Requirement, Setting, TokenDtype

EXAMPLES, TRIPLES = 100, 200
#: Requests and machines for one set of declarations; making declarations takes longer than resolving them.
SAME_SPECS = 5
TOKENS = (TokenDtype("bf16"), TokenDtype("fp16"), TokenDtype("fp8", "row_128"), TokenDtype("int8", "token"))
SCHEMES = (BF16, FP16, FP8_BLOCK128, W8A8_INT8)
FORMATS = ("standard", "contiguous", "masked")
Triple = tuple[list[PluginSpec], LayerRequest, Environment]


def _some(rng: random.Random, choices: Any, least: int = 1) -> list[Any]:
    return rng.sample(list(choices), rng.randint(least, len(choices)))


def _part(rng: random.Random) -> dict[str, Any]:
    """What dispatchers and runners declare alike."""
    return {
        "devices": rng.choice([("any",), ("cuda",), ("cpu", "cuda"), ("npu",)]),
        "archs": rng.choice([(), (), ("sm90",), ("sm100", "sm90")]),
        "limits": _some(rng, [Limit("top_k", "<=", 4), Limit("hidden_size", "multiple_of", 128)], 0)[:1],
        "requirements": _some(rng, [Requirement(module="lib", minimum=rng.choice(["", "2.0"]))], 0),
        "settings": _some(rng, [Setting(values={"LIB_COUNTS": ("", "1")})], 0),
        "phases": rng.choice([("any",), ("prefill",), ("decode", "verify")]),
        "graph_safe": rng.random() < 0.7,
        "deterministic": rng.random() < 0.5,
        "down_gemm_overlap": rng.random() < 0.7,
        "weight_on_input": rng.random() < 0.7,
    }


def _plugin(rng: random.Random, name: str) -> PluginSpec:
    dispatchers = [
        dispatcher(
            rng.choice(["none", "a2a"]),
            f"mode{index}",
            format=rng.choice(FORMATS),
            sends=_some(rng, TOKENS),
            token_placements=rng.choice([("distributed",), ("replicated",), ("distributed", "replicated")]),
            row_alignment=rng.choice([0, 0, 8, 128]),
            id_space=rng.choice(["local", "local", "global"]),
            dtypes=_some(rng, ["bf16", "fp16"]),
            **_part(rng),
        )
        for index in range(rng.randint(0, 2))
    ]
    runners = []
    for index in range(rng.randint(0, 2)):
        format_ = rng.choice([*FORMATS, "fused"])
        runners.append(
            runner(
                rng.choice(["gemm", "loop"]),
                f"kernel{index}",
                format=format_,
                a2a="fused_a2a" if format_ == "fused" else None,
                reads=_some(rng, TOKENS),
                schemes=_some(rng, SCHEMES),
                activations=(ActivationPattern(kind=rng.choice(["any", "silu"]), parameters=rng.random() < 0.5),),
                dtypes=_some(rng, ["bf16", "fp16"]),
                bias=rng.random() < 0.7,
                post_norm=rng.random() < 0.7,
                row_alignment=rng.choice([1, 1, 8, 16]),
                tier=rng.choice(["reference", "generic", "tuned"]),
                **_part(rng),
            )
        )
    return plugin(name, dispatchers=dispatchers, runners=runners)


def _request(rng: random.Random, **pins: str) -> LayerRequest:
    dtype = rng.choice(["bf16", "bf16", "fp16"])
    workload = Workload(
        phase=rng.choice(["any", "prefill", "decode"]),
        graph_capture=rng.random() < 0.2,
        down_gemm_overlap=rng.random() < 0.2,
    )
    return LayerRequest(
        num_experts=16,
        top_k=rng.choice([2, 8]),
        hidden_size=rng.choice([256, 96]),
        intermediate_size=64,
        dtype=dtype,
        quant=rng.choice([FP8_BLOCK128, W8A8_INT8, BF16 if dtype == "bf16" else FP16]),
        activation=rng.choice([ActivationSpec(), ActivationSpec(kind="gelu"), ActivationSpec(limit=7.0)]),
        bias=rng.random() < 0.2,
        weight_on_input=rng.random() < 0.2,
        post_norm=rng.random() < 0.2,
        ep_size=rng.choice([1, 1, 4]),
        token_placement=rng.choice(["distributed", "replicated"]),
        workloads=(workload,),
        deterministic=rng.random() < 0.2,
        **pins,
    )


def _environment(rng: random.Random) -> Environment:
    device, arch = rng.choice([("cpu", ""), ("cuda", "sm90"), ("cuda", "sm80"), ("npu", "a3")])
    packages = rng.choice([{}, {"lib": "1.0"}, {"lib": "2.1"}])
    variables = rng.choice([{}, {}, {"LIB_COUNTS": "0"}])
    # Whatever is found by looking is taken.
    return Environment(device_type=device, arch=arch, packages=packages, variables=variables, source="probed")


def _triples(seed: int) -> Iterator[tuple[random.Random, Triple]]:
    rng = random.Random(seed)
    for index in range(TRIPLES):
        if index % SAME_SPECS == 0:
            specs = [_plugin(rng, name) for name in ("alpha", "beta", "gamma")[: rng.randint(1, 3)]]
        yield rng, (specs, _request(rng), _environment(rng))


def _shuffled(rng: random.Random, specs: list[PluginSpec]) -> list[PluginSpec]:
    """The same declarations in another order, of plugins and inside them."""
    turned = [attrs.evolve(s, dispatchers=s.dispatchers[::-1], runners=s.runners[::-1]) for s in specs]
    return rng.sample(turned, len(turned))


def _check_rows(decision: Decision) -> None:
    """A row without reasons is feasible, a row with reasons is not, and nothing else decides."""
    (workload,) = decision.workloads
    expect(all(report.is_refused == bool(report.reasons) for report in workload.specs), "refused without a reason")
    passed = {report.declared.full_name for report in workload.specs if not report.reasons}
    for pair in workload.pairs:
        parts = [part for part in (pair.candidate.dispatcher, pair.candidate.runner) if part is not None]
        expect({part.full_name for part in parts} <= passed, "a pair of specs that did not pass alone")
    without_reasons = _possible(decision)
    ranked = [entry.candidate.full_name for entry in workload.ranked]
    # A deterministic layer keeps one of those that are possible.
    unshared = {candidate.full_name for candidate in workload.unshared}
    expect({*ranked} | unshared == without_reasons and not {*ranked} & unshared, (ranked, unshared, without_reasons))
    expect(len(ranked) == len(set(ranked)), "a candidate is ranked twice")
    expect(decision.is_feasible == bool(ranked), decision.error)


def _possible(decision: Decision) -> set[str]:
    return {pair.candidate.full_name for pair in decision.workloads[0].pairs if not pair.reasons}


def _check_pins(rng: random.Random, triple: Triple, free: Decision) -> None:
    """A pin is honoured by everything that is ranked, or nothing is ranked."""
    specs, request, environment = triple
    runners = [part.full_name for spec in specs for part in (DeclaredRunner(spec.name, r) for r in spec.runners)]
    if not runners:
        return
    pin = rng.choice(runners)
    decision = resolve(specs, attrs.evolve(request, runner_backend=pin), environment)
    expect({entry.candidate.runner.full_name for entry in decision.workloads[0].ranked} <= {pin}, pin)
    pairs = free.workloads[0].pairs
    was_possible = any(pair.candidate.runner.full_name == pin for pair in pairs if not pair.reasons)
    expect(decision.is_feasible == was_possible, f"pin {pin}: {decision.explain()}")


def _fixed(triple: Triple, reason: Reason, part: DeclaredDispatcher | DeclaredRunner) -> Triple:
    """The triple after someone did what one reason names."""
    specs, request, environment = triple
    spec: Any = part.spec
    workload = request.workloads[0]
    if reason.code in ("package", "version"):
        return specs, request, attrs.evolve(environment, packages={"lib": "9.0"})
    if reason.code == "variable":
        return specs, request, attrs.evolve(environment, variables={})
    changes: dict[str, Any] = {
        "device": {"devices": ("any",)},
        "arch": {"archs": ()},
        "scheme": {"schemes": (*getattr(spec, "schemes", ()), request.local_quant)},
        "activation": {"activations": (ActivationPattern(kind="any", parameters=True),)},
        "dtype": {"dtypes": ("bf16", "fp16", "fp32")},
        "bias": {"bias": True},
        "weighting": {"weight_on_input": True},
        "post-norm": {"post_norm": True},
        "phase": {"phases": (*spec.phases, workload.phase)},
        "limit": {"limits": ()},
        "tokens": {"token_placements": ("distributed", "replicated")},
        "graph": {"graph_safe": True},
        "overlap": {"down_gemm_overlap": True},
        "determinism": {"deterministic": True},
        "alignment": {"row_alignment": 0},
        "format": {"id_space": "local"},
        "dispatch-dtype": {"sends": TOKENS} if isinstance(part, DeclaredDispatcher) else {"reads": TOKENS},
    }[reason.code]
    changed = attrs.evolve(spec, **changes)
    kind = "dispatchers" if isinstance(part, DeclaredDispatcher) else "runners"
    return (
        [
            attrs.evolve(owner, **{kind: [changed if own == spec else own for own in getattr(owner, kind)]})
            if owner.name == part.plugin
            else owner
            for owner in specs
        ],
        request,
        environment,
    )


def _check_fixing(triple: Triple) -> None:
    """Whoever does what the reasons against one pair of one format name ends with that pair feasible."""
    names = _any_pair(triple[0])
    for _ in range(2 * len(FORMATS)):
        decision = resolve(*triple)
        (workload,) = decision.workloads
        if not names or " + ".join(names) in _possible(decision):
            return
        reports = [report for report in workload.specs if report.declared.full_name in names]
        against = [(reason, report.declared) for report in reports for reason in report.reasons]
        if not against:
            (pair,) = [pair for pair in workload.pairs if _names(pair.candidate) == set(names)]
            parts = [part for part in (pair.candidate.dispatcher, pair.candidate.runner) if part is not None]
            against = [(reason, part) for reason in pair.reasons for part in parts if _may_fix(reason, part)]
        expect(against, f"{names} is not feasible and has no reason:\n{decision.explain()}")
        for reason, part in against:
            # An earlier fix may have replaced the spec.
            triple = _fixed(triple, reason, _again(triple[0], part))
    expect(False, f"{names} is still not feasible:\n{resolve(*triple).explain()}")  # fmt: skip


def _may_fix(reason: Reason, part: DeclaredDispatcher | DeclaredRunner) -> bool:
    return reason.code != "alignment" or isinstance(part, DeclaredDispatcher)


def _names(candidate: Any) -> set[str]:
    return {part.full_name for part in (candidate.dispatcher, candidate.runner) if part is not None}


def _any_pair(specs: list[PluginSpec]) -> tuple[str, ...]:
    dispatchers = [DeclaredDispatcher(spec.name, part) for spec in specs for part in spec.dispatchers]
    for declared in (DeclaredRunner(spec.name, part) for spec in specs for part in spec.runners):
        if declared.spec.format == "fused":
            continue
        for sender in dispatchers:
            if sender.spec.format == declared.spec.format:
                return sender.full_name, declared.full_name
    return ()


def _again(specs: list[PluginSpec], part: DeclaredDispatcher | DeclaredRunner) -> DeclaredDispatcher | DeclaredRunner:
    for spec in specs:
        for own in (*spec.dispatchers, *spec.runners):
            if spec.name == part.plugin and own.short_name == part.spec.short_name and type(own) is type(part.spec):
                return attrs.evolve(part, spec=own)
    raise LookupError(part.full_name)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 1 << 32))
def test_any_declarations_any_request_any_machine(seed: int) -> None:
    for index, (rng, triple) in enumerate(_triples(seed)):
        specs, request, environment = triple
        decision = resolve(specs, request, environment)
        _check_rows(decision)
        shuffled = resolve(_shuffled(rng, specs), request, environment)
        expect(shuffled == decision, "the order of declarations matters")
        _check_pins(rng, triple, decision)
        if index % SAME_SPECS == 0:
            _check_fixing(triple)
