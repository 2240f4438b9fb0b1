"""Which mode of DeepEP serves a layer, in which dtype tokens travel, and what is refused with which reason."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from deepep_layers import B200, H100, decision_of, manager, plan_of, request

from moe_core import LayerRequest, Workload
from moe_core.deprecated import BF16_DISPATCH_VARIABLE, bf16_dispatch_requested
from moe_core.environment import Environment
from moe_core.errors import ResolutionError
from moe_core.plan import MoEPlan
from moe_core.planner import PlanWarning, make_plan
from moe_core.quant import BF16, FP8_BLOCK128, FP8_BLOCK128_UE8M0, W8A8_INT8

PHASES = (Workload(phase="prefill"), Workload(phase="decode", max_tokens=128, graph_capture=True))
DECODE = Workload(phase="decode", max_tokens=128)
LOW_LATENCY = {"a2a_backend": "deepep.low_latency", "workloads": DECODE}


def without(package: str, machine: Environment = H100) -> Environment:
    """The machine with one package less."""
    return attrs.evolve(machine, packages={n: v for n, v in machine.packages if n != package})


def names(plan: MoEPlan) -> list[tuple[str, str, str, str]]:
    """Phase, dispatcher, runner and token dtype of each route, by phase."""
    parts = [(r.phase, r.candidate.full_name, str(r.token_dtype), r.dtype_rule) for r in plan.routes]
    return sorted((phase, *pair.split(" + "), dtype) for phase, pair, dtype, _ in parts)


@pytest.mark.parametrize(
    ("quant", "machine", "kind", "dtype"),
    [(BF16, H100, "bf16", "bf16"), (FP8_BLOCK128, H100, "fp8", "fp8/column_128")],
    ids=str,
)
def test_prefill_and_decode_share_one_set_of_weights(quant: Any, machine: Environment, kind: str, dtype: str) -> None:
    plan = plan_of(machine, quant=quant, workloads=PHASES)
    assert names(plan) == [
        ("decode", "cuda_deepgemm:deepep.low_latency", f"cuda_deepgemm:deep_gemm.{kind}_masked", dtype),
        ("prefill", "cuda_deepgemm:deepep.normal", f"cuda_deepgemm:deep_gemm.{kind}_contiguous", dtype),
    ]
    assert plan.weight_layout == "canonical"
    assert plan.output_is_complete


@pytest.mark.parametrize("arch", ["sm100", "sm103"])
def test_blackwell_gets_packed_scales_and_says_that_nobody_ran_it(arch: str) -> None:
    plan = plan_of(attrs.evolve(B200, arch=arch), quant=FP8_BLOCK128_UE8M0, workloads=DECODE)
    (route,) = plan.routes
    assert (route.dispatcher.spec.mode, str(route.token_dtype)) == ("low_latency_unverified", "fp8/ue8m0_128")


def test_deepep_is_what_runs_where_nothing_is_pinned() -> None:
    plan = plan_of(quant=BF16, a2a_backend=None, workloads=PHASES)
    assert {route.candidate.a2a_backend for route in plan.routes} == {"deepep"}
    assert {route.runner.spec.name for route in plan.routes} == {"deep_gemm"}


@pytest.mark.parametrize("runner", ["deep_gemm", "torch"])
def test_whoever_reads_bf16_alone_gets_bf16(runner: str) -> None:
    plan = plan_of(quant=BF16, runner_backend=runner, workloads=(Workload(phase="prefill"), DECODE))
    assert [str(route.token_dtype) for route in plan.routes] == ["bf16", "bf16"]
    assert {route.dtype_rule for route in plan.routes} == {"runner"}


@pytest.mark.parametrize("order", [(BF16, FP8_BLOCK128), (FP8_BLOCK128, BF16)], ids=str)
def test_layers_do_not_learn_of_each_other(order: tuple[Any, Any]) -> None:
    together, shared = {}, manager()
    for quant in order:
        together[quant] = make_plan(shared, request(quant=quant, workloads=DECODE), H100)[0]
    assert str(together[BF16].routes[0].token_dtype) == "bf16"
    assert str(together[FP8_BLOCK128].routes[0].token_dtype) == "fp8/column_128"


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize(
    ("fields", "dtype", "rule"),
    [
        pytest.param({}, "fp8/column_128", "runner", id="the runner's preference"),
        pytest.param({"dispatch_dtype": "bf16"}, "bf16", "pin", id="a pin"),
        pytest.param({"bf16_dispatch_variable": True}, "bf16", "variable", id="the deprecated variable"),
        pytest.param(
            {"dispatch_dtype": "fp8", "bf16_dispatch_variable": True}, "fp8/column_128", "pin", id="a pin above it"
        ),
    ],
)
def test_the_dtype_of_fp8_layers(mode: str, fields: dict[str, Any], dtype: str, rule: str) -> None:
    (route,) = plan_of(quant=FP8_BLOCK128, a2a_backend=f"deepep.{mode}", workloads=DECODE, **fields).routes
    assert (str(route.token_dtype), route.dtype_rule) == (dtype, rule)


def test_the_deprecated_variable_warns() -> None:
    with pytest.warns(DeprecationWarning, match="use dispatch_dtype='bf16'"):
        asked = bf16_dispatch_requested({BF16_DISPATCH_VARIABLE: "1"})
    (route,) = plan_of(quant=FP8_BLOCK128, workloads=DECODE, bf16_dispatch_variable=asked).routes
    assert str(route.token_dtype) == "bf16"


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        pytest.param({"dispatch_dtype": "fp8"}, ["pinned fp8", "only bf16"], id="fp8 for bf16 experts"),
        pytest.param({"dispatch_dtype": "nvfp4"}, ["pinned nvfp4", "only bf16"], id="nvfp4"),
        pytest.param({"quant": W8A8_INT8, "dispatch_dtype": "int8"}, ["pinned int8", "only bf16"], id="int8"),
        pytest.param({"dtype": "fp16"}, ["layer dtype bf16", "fp16"], id="fp16"),
        pytest.param({"bias": True, "runner_backend": "deep_gemm"}, ["a layer without expert biases"], id="biases"),
        pytest.param({"weight_on_input": True}, ["router weights on the output"], id="weights on inputs"),
        pytest.param({"token_placement": "replicated"}, ["distributed tokens"], id="replicated tokens"),
        pytest.param({"ep_size": 1}, ["ep_size", "one rank needs no transport"], id="one rank"),
        pytest.param({"ep_size": 16, "num_experts": 64}, ["ep_size 16", "torch_alltoall"], id="two hosts"),
    ],
)
def test_refused_by_both_modes(fields: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ResolutionError) as caught:
        plan_of(**fields, workloads=DECODE)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({**LOW_LATENCY, "hidden_size": 3584}, "hidden_size 3584", id="a size without kernel"),
        pytest.param({**LOW_LATENCY, "top_k": 12}, "top_k <= 11, found top_k 12", id="twelve experts"),
        pytest.param(
            {**LOW_LATENCY, "workloads": Workload(phase="decode", max_tokens=897)}, "max_tokens <= 896", id="tokens"
        ),
        pytest.param({**LOW_LATENCY, "workloads": Workload(phase="prefill")}, "decode or verify", id="a prefill"),
        pytest.param({"a2a_backend": "deepep.normal", "ep_size": 3}, "ep_size 3", id="three ranks"),
        pytest.param({"a2a_backend": "deepep.normal", "hidden_size": 8192}, "hidden_size 8192", id="wide tokens"),
        pytest.param({"a2a_backend": "deepep.normal", "num_experts": 1032}, "num_local_experts 129", id="experts"),
        pytest.param({"a2a_backend": "deepep.normal", "top_k": 33}, "top_k 33", id="33 experts per token"),
        pytest.param(
            {"a2a_backend": "deepep.normal", "workloads": PHASES[1]}, "a graph-safe backend", id="a captured graph"
        ),
    ],
)
def test_refused_by_one_mode(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ResolutionError) as caught:
        plan_of(**fields)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({**LOW_LATENCY, "top_k": 10, "num_experts": 512, "hidden_size": 2048}, id="ten experts per token"),
        pytest.param({**LOW_LATENCY, "top_k": 11}, id="eleven"),
        pytest.param({**LOW_LATENCY, "ep_size": 3}, id="three ranks"),
        pytest.param({**LOW_LATENCY, "hidden_size": 8192}, id="the widest token"),
        pytest.param({**LOW_LATENCY, "workloads": Workload(phase="verify", max_tokens=896)}, id="896 tokens"),
        pytest.param({"a2a_backend": "deepep.normal", "num_experts": 1024}, id="128 experts of a rank"),
        *(pytest.param({"a2a_backend": "deepep.normal", "ep_size": ranks}, id=f"{ranks} ranks") for ranks in (2, 4, 8)),
    ],
)
def test_just_inside_the_limits(fields: dict[str, Any]) -> None:
    assert plan_of(**fields).routes[0].runner.spec.name == "deep_gemm"


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("package", "fields"),
    [("deep_ep", {}), ("deep_gemm", {"runner_backend": "deep_gemm"})],
)
def test_a_pinned_library_that_is_missing_says_what_to_install(package: str, fields: dict[str, Any]) -> None:
    machine = without(package)
    with pytest.raises(ResolutionError) as caught:
        plan_of(machine, workloads=PHASES, **fields)
    assert f"{package}" in str(caught.value)
    assert "not installed" in str(caught.value)
    assert "pip install" in str(caught.value)
    assert "would run without the pins" in str(caught.value)


def test_a_fallback_takes_what_runs_and_says_so() -> None:
    with pytest.warns(PlanWarning, match=r"asked for a2a deepep, .*needs deep_ep, found not installed"):
        plan = plan_of(without("deep_ep"), workloads=(Workload(phase="prefill"), DECODE), allow_fallback=True)
    assert {route.candidate.a2a_backend for route in plan.routes} == {"torch_alltoall"}
    assert any("deepep" in note for note in plan.notes)


def test_another_runner_serves_where_deep_gemm_is_missing() -> None:
    fields = {"runner_backend": "deep_gemm", "workloads": DECODE, "allow_fallback": True}
    with pytest.warns(PlanWarning, match="deep_gemm"):
        (route,) = plan_of(without("deep_gemm"), **fields).routes
    assert (route.candidate.a2a_backend, route.runner.spec.name) == ("deepep", "torch")
    assert str(route.token_dtype) == "bf16"


def test_an_older_gpu_is_a_reason() -> None:
    decision = decision_of(attrs.evolve(H100, arch="sm80"), workloads=DECODE)
    assert not decision.is_feasible
    assert "sm90" in decision.explain()
    assert "sm80" in decision.explain()


def test_a_draft_layer_of_another_size_gets_a_mode_of_its_own() -> None:
    layers: list[LayerRequest] = [request(hidden_size=7168, workloads=DECODE), request(hidden_size=3584)]
    modes = [make_plan(manager(), layer, H100)[0].routes[0].dispatcher.spec.mode for layer in layers]  # type: ignore[union-attr]
    assert modes == ["low_latency", "normal"]
