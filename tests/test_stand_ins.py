"""A runner that takes the place of one that is refused: what the decision and the plan say about it, and when."""

from __future__ import annotations

import json
import warnings
from typing import Any

import attrs
import pytest
from fakes import (
    CPU,
    PREFILL_AND_DECODE,
    bare_plugin,
    decide,
    dispatcher,
    expect,
    fake_plugin,
    manager_of,
    plan,
    plugin,
    request,
    runner,
)

from moe_core.errors import PluginError, ResolutionError
from moe_core.manager import BackendManager
from moe_core.planner import make_plan
from moe_core.quant import BF16, FP16, W4A8_INT8, W8A8_INT8
from moe_core.request import Workload
from moe_core.specs import Limit, PluginSpec, Requirement

WHOLE = tuple(Limit(field, "multiple_of", 32) for field in ("hidden_size", "intermediate_size"))
TILED = runner("acme", "tiled", weight_layout="acme_tiled", limits=WHOLE, tier="tuned")
PLAIN = runner("acme", "plain", weight_layout="acme_plain", stands_in_for="acme.tiled")
ACME = plugin("acme", dispatchers=[dispatcher("none")], runners=[TILED, PLAIN])
OFF = "acme:acme.plain stands in for acme.tiled: needs intermediate_size multiple_of 32, found intermediate_size 100"
OFF_BOTH = "acme:acme.plain stands in for acme.tiled: needs hidden_size multiple_of 32, found hidden_size 33"


def notes(machine: Any = CPU, spec: PluginSpec = ACME, **fields: Any) -> tuple[str, ...]:
    """The notes of the only workload, which are those of the plan."""
    layer = request(**fields)
    (workload,) = decide(layer, machine, spec).workloads
    assert plan(layer, machine, spec).notes == workload.notes
    return workload.notes


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"intermediate_size": 96}, ()),
        ({"intermediate_size": 100}, (OFF,)),
        ({"intermediate_size": 128}, ()),
        ({"intermediate_size": 200, "tp_size": 2}, (OFF,)),
        ({"intermediate_size": 192, "tp_size": 2}, ()),
        # The first reason, and how many others there are.
        ({"intermediate_size": 100, "hidden_size": 33}, (f"{OFF_BOTH}, and 1 more",)),
    ],
)
def test_it_is_noted_exactly_where_the_other_is_refused(fields: dict[str, Any], said: tuple[str, ...]) -> None:
    assert notes(**fields) == said


def test_every_form_of_the_decision_has_it() -> None:
    decision = decide(request(intermediate_size=100), CPU, ACME)
    assert f"  note: {OFF}" in decision.explain().splitlines()
    assert f"  note: {OFF}" in decision.explain(full=True).splitlines()
    (workload,) = json.loads(json.dumps(decision.to_json()))["workloads"]
    assert workload["notes"] == [OFF]


@pytest.mark.parametrize("pin", ["acme.plain", "acme"])
@pytest.mark.parametrize(("size", "said"), [(96, ()), (100, (OFF,))])
def test_a_pin_of_the_stand_in_is_no_refusal_of_the_other(pin: str, size: int, said: tuple[str, ...]) -> None:
    assert notes(runner_backend=pin, intermediate_size=size) == said


def test_whoever_excludes_the_other_is_told_only_of_what_else_is_against_it() -> None:
    assert notes(exclude=("acme.tiled",), intermediate_size=96) == ()
    assert notes(exclude=("acme.tiled",), intermediate_size=100) == (OFF,)


def test_a_package_that_is_missing_is_a_reason_too() -> None:
    needs = Requirement(module="acme_tiles", minimum="2", install="pip install acme-tiles")
    spec = attrs.evolve(ACME, runners=[attrs.evolve(TILED, requirements=(needs,)), PLAIN])
    assert notes(spec=spec) == ("acme:acme.plain stands in for acme.tiled: needs acme_tiles >= 2, found not installed",)
    assert notes(machine=attrs.evolve(CPU, packages={"torch": "2.13.0", "acme_tiles": "2.0"}), spec=spec) == ()


def test_numbers_are_as_asked_so_that_nothing_is_warned_about_and_strict_takes_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = plan(request(intermediate_size=100, strict=True), CPU, ACME)
    assert (made.weight_layout, made.notes) == ("acme_plain", (OFF,))


def test_the_order_is_the_same_as_without_the_field() -> None:
    silent = attrs.evolve(ACME, runners=[TILED, attrs.evolve(PLAIN, stands_in_for=None)])
    for size in (96, 100):
        (said,), (unsaid,) = (decide(request(intermediate_size=size), CPU, s).workloads for s in (ACME, silent))
        assert [r.candidate.runner.spec.kernel for r in said.ranked] == [
            r.candidate.runner.spec.kernel for r in unsaid.ranked
        ]
        assert unsaid.notes == ()


def test_a_layout_that_all_workloads_share_is_noted_where_the_other_is_refused() -> None:
    few = attrs.evolve(TILED, limits=(*WHOLE, Limit("max_tokens", "<=", 128)))
    spec = attrs.evolve(ACME, runners=[few, PLAIN])
    layer = request(workloads=PREFILL_AND_DECODE)
    prefill, decode = decide(layer, CPU, spec).workloads
    note = "acme:acme.plain stands in for acme.tiled: needs max_tokens <= 128, found max_tokens 4096"
    assert prefill.notes == (note,)
    (shared,) = decode.notes
    assert shared.startswith("weight-layout: acme_plain serves all workloads; not used: acme:none.standard")
    assert plan(layer, CPU, spec).notes == (note, shared)
    assert "stands in" not in "".join(plan(request(workloads=PREFILL_AND_DECODE), CPU, ACME).notes)


def test_a_plan_notes_what_a_hook_chose_and_not_what_stood_first() -> None:
    other = runner("acme", "zother", weight_layout="acme_plain", tier="reference")

    def choose(name: str) -> Any:
        return lambda candidates: next(c for c in candidates if c.runner.spec.kernel == name)

    for name, said in (("plain", (OFF,)), ("zother", ())):
        manager = manager_of(attrs.evolve(ACME, runners=[TILED, PLAIN, other]))
        manager.register("policy", bare_plugin("policy", {"select_dispatcher": choose(name)}))
        made, decision = make_plan(manager, request(intermediate_size=100, workloads=Workload(max_tokens=8)), CPU)
        assert made.routes[0].selected_by == "policy"
        assert decision.workloads[0].notes == (OFF,)
        assert made.notes == said
    # The other way round: what stands in is chosen, but was not first.
    first = attrs.evolve(other, tier="tuned")
    manager = manager_of(attrs.evolve(ACME, runners=[TILED, PLAIN, first]))
    manager.register("policy", bare_plugin("policy", {"select_dispatcher": choose("plain")}))
    made, decision = make_plan(manager, request(intermediate_size=100), CPU)
    assert (decision.workloads[0].notes, made.notes) == ((), (OFF,))


@pytest.mark.error_path
def test_a_refusal_is_about_what_is_missing() -> None:
    with pytest.raises(ResolutionError) as caught:
        plan(request(intermediate_size=100, runner_backend="acme.tiled"), CPU, ACME)
    expect("needs intermediate_size multiple_of 32" in str(caught.value), caught.value)
    expect("stands in" not in str(caught.value), caught.value)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("runners", "fault"),
    [
        ([PLAIN], "runner acme.plain stands in for 'acme.tiled', expected one of its runners .*: there is none"),
        ([TILED, attrs.evolve(PLAIN, stands_in_for="tiled")], "stands in for 'tiled', .* for none: acme.tiled$"),
        ([TILED, attrs.evolve(PLAIN, stands_in_for="")], "stands in for '', .* for none: acme.tiled"),
        ([TILED, attrs.evolve(PLAIN, stands_in_for="acme.plain")], "acme.plain stands in for 'acme.plain', expected"),
        ([TILED, PLAIN, attrs.evolve(PLAIN, kernel="third", stands_in_for="acme.plain")], "acme.third stands in for"),
    ],
    ids=["unknown", "not in full", "empty", "itself", "another stand-in"],
)
def test_a_declaration_that_stands_in_for_nothing_is_refused(runners: list[Any], fault: str) -> None:
    def declare() -> PluginSpec:
        return plugin("acme", dispatchers=[dispatcher("none")], runners=runners)

    manager = BackendManager()
    with pytest.raises(PluginError, match=fault):
        manager.register("acme", fake_plugin("acme", runners=[TILED], hooks={"declare_backends": declare}))
    expect(manager.names() == (), manager.names())


_FOR_CPU = {"devices": ("cpu",), "tier": "tuned"}
MADE = plugin(
    "acme",
    runners=[
        runner("acme", "w8", schemes=(W8A8_INT8,), limits=WHOLE[:1], **_FOR_CPU),
        runner("acme", "w4", schemes=(W4A8_INT8,), bias=True, **_FOR_CPU),
        # Is for any device, too, and so was as slow.
        runner("acme", "slow", schemes=(FP16,), devices=("cpu",), tier="reference"),
    ],
)
ANYWHERE = plugin("toy", dispatchers=[dispatcher()], runners=[runner(schemes=(BF16, W8A8_INT8), bias=True)])
SLOW = "toy:toy.standard is for any device and may be slow: what is for cpu needs"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, (f"{SLOW} w8a8_int8 or w4a8_int8, found bf16",)),
        ({"quant": W8A8_INT8}, ()),
        # Of what reads the weights is said what it lacks.
        ({"quant": W8A8_INT8, "hidden_size": 33}, (f"{SLOW} hidden_size multiple_of 32, found hidden_size 33",)),
        ({"quant": W8A8_INT8, "bias": True}, (f"{SLOW} a layer without expert biases, found expert biases",)),
        # Whoever asked for it knows.
        ({"runner_backend": "toy"}, ()),
        ({"exclude": ("acme",)}, ()),
    ],
)
def test_what_is_for_any_device_says_that_nothing_made_for_this_one_takes_the_layer(
    fields: dict[str, Any], said: tuple[str, ...]
) -> None:
    layer = request(**fields)
    decision = decide(layer, CPU, MADE, ANYWHERE)
    assert plan(layer, CPU, MADE, ANYWHERE).notes == decision.workloads[0].notes == said


def test_a_machine_for_which_nothing_is_made_has_no_such_note() -> None:
    elsewhere = attrs.evolve(MADE, runners=[attrs.evolve(each, devices=("npu",)) for each in MADE.runners])
    absent = attrs.evolve(MADE, requirements=(Requirement(module="acme", minimum="2", install="pip install acme"),))
    for spec in (elsewhere, absent):
        assert plan(request(), CPU, spec, ANYWHERE).notes == ()
