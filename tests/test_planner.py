from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import attrs
import pytest
from fakes import (
    BF16_TOKENS,
    CPU,
    DECODE,
    FP8_COLUMN,
    PREFILL_AND_DECODE,
    SM90,
    TORCH,
    VENDORS,
    bare_plugin,
    dispatcher,
    expect,
    fake_plugin,
    manager_of,
    plan,
    plugin,
    request,
    runner,
)
from measured import measured

from moe_core.errors import PluginError, ResolutionError, UnknownNameError
from moe_core.manager import BackendManager
from moe_core.measurement_sources import MeasurementWarning, user_file
from moe_core.measurements import MeasurementTable
from moe_core.planner import PlanWarning, make_plan, plan_layers
from moe_core.request import LayerRequest, Workload
from moe_core.specs import Limit

WITHOUT_DEEP_GEMM = attrs.evolve(SM90, packages={"torch": "2.11.0", "deep_ep": "1.2.1"})
SPEC = plugin(dispatchers=[dispatcher()], runners=[runner("a", tier="tuned"), runner("b"), runner("c")])


def _last(candidates: Any) -> Any:
    return candidates[-1]


def test_routes_of_two_workloads_share_the_weights() -> None:
    made = plan(request(a2a_backend="deepep", workloads=PREFILL_AND_DECODE), SM90)
    assert [(route.phase, route.max_tokens, route.runner.spec.kernel) for route in made.routes] == [
        ("decode", 128, "masked_bf16"),
        ("prefill", 4096, "contiguous_bf16"),
    ]
    assert {route.token_dtype for route in made.routes} == {BF16_TOKENS}
    assert {route.row_alignment for route in made.routes} == {128}
    assert made.weight_layout == "canonical"


@pytest.mark.parametrize("workloads", [PREFILL_AND_DECODE, PREFILL_AND_DECODE[::-1]])
def test_a_deterministic_layer_gets_one_route(workloads: tuple[Workload, ...]) -> None:
    made = plan(request(deterministic=True, workloads=workloads), CPU)
    (route,) = made.routes
    assert (route.phase, route.max_tokens, route.runner.full_name) == ("any", 4096, "torch:torch.standard")


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_route_knows_that_combine_begins_early(deterministic: bool) -> None:
    can = {"format": "masked", "down_gemm_overlap": True, "deterministic": True}
    parts = plugin(dispatchers=[dispatcher(**can)], runners=[runner(**can)])
    early = Workload(phase="decode", max_tokens=64, down_gemm_overlap=True)
    layer = request(workloads=(early, Workload(phase="prefill")), deterministic=deterministic)
    overlaps = {route.phase: route.down_gemm_overlap for route in plan(layer, CPU, parts).routes}
    assert overlaps == ({"any": True} if deterministic else {"decode": True, "prefill": False})


@pytest.mark.parametrize(
    ("fields", "complete"),
    [
        ({}, True),
        ({"tp_size": 2}, False),
        ({"ep_size": 2}, True),
        ({"ep_size": 2, "token_placement": "replicated"}, False),
        ({"ep_size": 2, "tp_size": 2}, False),
    ],
)
def test_whether_the_output_is_complete(fields: dict[str, Any], complete: bool) -> None:
    spec = plugin(dispatchers=[dispatcher(token_placements=("distributed", "replicated"))], runners=[runner()])
    assert plan(request(**fields), CPU, spec).output_is_complete is complete


@pytest.mark.parametrize(("asked", "limit"), [(None, 512), (64, 64)])
def test_a_route_never_takes_more_tokens_than_its_backends_declare(asked: int | None, limit: int) -> None:
    spec = plugin(
        dispatchers=[dispatcher(limits=(Limit("max_tokens", "<=", 512),))],
        runners=[runner(limits=(Limit("max_tokens", "<=", 1024), Limit("top_k", "<=", 8)))],
    )
    (route,) = plan(request(workloads=Workload(max_tokens=asked)), CPU, spec).routes
    assert route.max_tokens == limit


# Hooks ----------------------------------------------------------------------------------------------------------


def _plan_with(hooks: dict[str, Any], policy: Any = None, table: MeasurementTable | None = None, **fields: Any) -> Any:
    manager = BackendManager()
    manager.register("toy", fake_plugin("toy", SPEC.dispatchers, SPEC.runners, hooks))
    if policy is not None:
        manager.register("policy", bare_plugin("policy", {"select_dispatcher": policy}))
    made, _ = make_plan(manager, request(workloads=Workload(max_tokens=8), **fields), CPU, table)
    (route,) = made.routes
    return route.runner.spec.name, route.selected_by


@pytest.mark.parametrize(
    ("policy", "fields", "answer"),
    [
        pytest.param(None, {}, ("c", "toy"), id="the plugin's own choice"),
        pytest.param(None, {"runner_backend": "b"}, ("b", "toy"), id="inside the pin"),
        pytest.param(None, {"prefer": ("b",)}, ("b", "rank"), id="prefer is above the plugin"),
        pytest.param(None, {"prefer": ("b", "a")}, ("b", "rank"), id="prefer two"),
        pytest.param(None, {"prefer": ("toy",)}, ("c", "toy"), id="prefer that orders nothing"),
        pytest.param(_last, {"prefer": ("b",)}, ("c", "policy"), id="a policy is asked"),
    ],
)
def test_who_chooses(policy: Any, fields: dict[str, Any], answer: tuple[str, str]) -> None:
    assert _plan_with({"select_dispatcher": _last}, policy, **fields) == answer


def _named(runner_name: str) -> str:
    return f"toy:toy.standard + toy:{runner_name}.standard"


def test_measurements_are_above_the_plugin() -> None:
    table = measured(request(), {_named("a"): {8: 3.0}, _named("b"): {8: 2.0}})
    assert _plan_with({"select_dispatcher": _last}, table=table) == ("b", "rank")


def test_a_policy_that_levels_ranges_leaves_one_route() -> None:
    table = measured(request(), {_named("a"): {8: 3.0, 64: 9.0}, _named("b"): {8: 4.0, 64: 5.0}})
    manager, layer = manager_of(SPEC), request(workloads=Workload(max_tokens=64))
    routes = make_plan(manager, layer, CPU, table)[0].routes
    assert [(route.runner.spec.name, route.max_tokens) for route in routes] == [("a", 22), ("b", 64)]
    seen = []

    def choose(request: LayerRequest, candidates: Any) -> Any:
        seen.append(request.workloads[0].max_tokens)
        return next(found for found in candidates if found.runner.spec.name == "c")

    manager.register("policy", bare_plugin("policy", {"select_dispatcher": choose}))
    (route,) = make_plan(manager, layer, CPU, table)[0].routes
    assert (route.runner.spec.name, route.max_tokens, seen) == ("c", 64, [22, 64])


def test_hooks_see_the_one_workload_in_question() -> None:
    seen = []
    hooks = {"select_dispatcher": lambda request: seen.append(request.workloads)}
    manager = BackendManager()
    manager.register("toy", fake_plugin("toy", SPEC.dispatchers, SPEC.runners, hooks))
    make_plan(manager, request(workloads=PREFILL_AND_DECODE), CPU)
    assert seen == [(workload,) for workload in PREFILL_AND_DECODE]


def test_the_dtype_that_a_hook_chose_is_recorded() -> None:
    spec = plugin(
        dispatchers=[dispatcher(sends=(BF16_TOKENS, FP8_COLUMN))], runners=[runner(reads=(BF16_TOKENS, FP8_COLUMN))]
    )
    manager = BackendManager()
    manager.register("toy", fake_plugin("toy", spec.dispatchers, spec.runners, {"select_output_dtype": _last}))
    (route,) = make_plan(manager, request(), CPU)[0].routes
    assert (route.token_dtype, route.dtype_rule) == (FP8_COLUMN, "hook:toy")


# Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.error_path
def test_a_refusal_says_what_is_missing_and_what_would_run() -> None:
    layer = request(a2a_backend="deepep", runner_backend="deep_gemm", workloads=DECODE)
    with pytest.raises(ResolutionError, match="no backend combination fits this layer on cuda sm90") as caught:
        plan(layer, WITHOUT_DEEP_GEMM)
    text = str(caught.value)
    for part in (
        "workload decode, a2a deepep, runner deep_gemm:",
        "masked_bf16, .masked_fp8: package: needs deep_gemm >= 2.4, found not installed; pip install",
        "would run without the pins: torch:none.standard + torch:torch.standard and 4 more",
        "LayerRequest(allow_fallback=True)",
        "every reason: error.decision.explain(full=True)",
    ):
        expect(part in text, text)
    expect("torch:torch.standard: " not in text, text)
    expect(caught.value.decision is not None)
    expect(str(pickle.loads(pickle.dumps(caught.value))) == text)


@pytest.mark.error_path
def test_a_fallback_is_warned_about_and_written_down() -> None:
    layer = request(a2a_backend="deepep", runner_backend="deep_gemm", workloads=DECODE, allow_fallback=True)
    with pytest.warns(PlanWarning, match="fallback: asked for a2a deepep, runner deep_gemm, kept a2a deepep, because"):
        made = plan(layer, WITHOUT_DEEP_GEMM)
    expect(made.routes[0].candidate.full_name == "cuda_deepgemm:deepep.low_latency + torch:torch.masked")
    expect(made.notes[0].startswith("fallback: "), made.notes)


@pytest.mark.error_path
@pytest.mark.parametrize(
    "fields",
    [
        {"a2a_backend": "broken:deepep"},
        {"runner_backend": "broken"},
        {"workloads": Workload(a2a_backend="broken:deepep.normal")},
        {"prefer": ("broken:deepep",)},
    ],
)
def test_naming_a_plugin_that_failed_raises_its_error(fields: dict[str, Any]) -> None:
    manager = manager_of(TORCH)
    cause = ImportError("libcuda.so.1 not found")
    manager.load([_broken(cause)])
    with pytest.raises(PluginError, match=r"'broken' .*libcuda.so.1 not found") as caught:
        make_plan(manager, request(**fields), CPU)
    expect(caught.value.__cause__ is cause)


@pytest.mark.error_path
def test_other_errors_mention_the_plugins_that_failed() -> None:
    manager = manager_of(TORCH)
    manager.load([_broken(ImportError("libcuda.so.1 not found"))])
    with pytest.raises(UnknownNameError, match=r"'deepep'.* Plugins that failed to load: broken .*libcuda"):
        make_plan(manager, request(a2a_backend="deepep"), CPU)
    with pytest.raises(ResolutionError, match="plugin broken failed: ImportError: libcuda"):
        make_plan(manager, request(ep_size=2), CPU)


def _broken(cause: Exception) -> Any:
    from moe_core.discovery import Found

    def load() -> object:
        raise cause

    return Found(name="broken", load=load, distribution="moe-plugin-broken", version="0.1")


# Many layers ----------------------------------------------------------------------------------------------------


def test_equal_layers_are_resolved_once() -> None:
    asked = []
    hooks = {"select_dispatcher": lambda candidates: asked.append(candidates)}
    manager = BackendManager()
    manager.register("toy", fake_plugin("toy", SPEC.dispatchers, SPEC.runners, hooks))
    plans = plan_layers(manager, {"a": request(), "b": request(), "c": request(top_k=4)}, CPU)
    assert plans["a"] is plans["b"]
    assert len(asked) == 2


@pytest.mark.error_path
def test_a_model_is_told_once_of_times_that_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = user_file(CPU)
    file.parent.mkdir(parents=True)
    file.write_text("no JSON")
    with pytest.warns(MeasurementWarning) as told:
        plan_layers(manager_of(SPEC), {"a": request(), "b": request(top_k=4)}, CPU)
    expect(len(told) == 1, told.list)


@pytest.mark.error_path
def test_errors_and_warnings_name_the_layer() -> None:
    manager = manager_of(*VENDORS)
    with pytest.raises(ResolutionError, match=r"layer model.1: no backend combination"):
        plan_layers(manager, {"model.0": request(), "model.1": request(ep_size=2)}, CPU)
    with pytest.raises(UnknownNameError) as caught:
        plan_layers(manager, {"model.2": request(prefer=("x",))}, CPU)
    expect(caught.value.__notes__ == ["while planning layer model.2"])
    with pytest.warns(PlanWarning, match="layer model.3: fallback"):
        plan_layers(manager, {"model.3": request(runner_backend="deep_gemm", allow_fallback=True)}, CPU)


def test_a_plan_as_asked_for_warns_about_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(request(), CPU)


# Every rank -----------------------------------------------------------------------------------------------------

_SCRIPT = """
import json
from moe_core.quant import FP8_BLOCK128
from fakes import *
layers = [request(workloads=PREFILL_AND_DECODE, a2a_backend="deepep", ep_size=4), request(quant=FP8_BLOCK128)]
print(json.dumps([plan(layer, SM90).canonical() for layer in layers]))
"""


def test_plans_are_equal_in_every_process() -> None:
    outputs = set()
    for seed in ("0", "1", "4242"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environ, capture_output=True, text=True, check=True)
        outputs.add(done.stdout)
    (output,) = outputs
    assert json.loads(output)[0]["request.ep_size"] == "4"


@pytest.mark.parametrize(
    "layer",
    [request(), request(workloads=PREFILL_AND_DECODE), request(top_k=2, prefer=("torch",))],
    ids=["plain", "phases", "prefer"],
)
def test_plans_travel_between_processes(layer: LayerRequest) -> None:
    made = plan(layer, SM90)
    copied = pickle.loads(pickle.dumps(made))
    assert copied == made
    assert copied.canonical() == made.canonical()
