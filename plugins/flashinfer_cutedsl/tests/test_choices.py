"""Which kernel serves an NVFP4 layer, in which dtype tokens reach it, and what is refused with which reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import moe_plugin_deepgemm.plugin as deepgemm
import pytest
from cutedsl_layers import B200, EARLIER, manager

from moe_core import LayerRequest, Workload
from moe_core.activation import GEGLU, RELU2, SWIGLU_OAI, ActivationSpec
from moe_core.decision import Decision
from moe_core.environment import PRESETS, Environment
from moe_core.errors import ResolutionError, UnknownNameError
from moe_core.manager import BackendManager
from moe_core.plan import MoEPlan
from moe_core.planner import PlanWarning, decide, make_plan
from moe_core.quant import BF16, NVFP4, NVFP4_W4A16, LayerQuant, QuantScheme

CPU, H100 = PRESETS["cpu"], PRESETS["h100"]
DECODE = Workload(phase="decode", max_tokens=128)
PREFILL = Workload(phase="prefill", max_tokens=4096)
SIZES = {"num_experts": 256, "top_k": 8, "hidden_size": 7168, "intermediate_size": 2048}
#: One rank, as it comes, and eight behind DeepEP.
ALONE: dict[str, Any] = {"quant": NVFP4}
TOGETHER: dict[str, Any] = {"quant": NVFP4, "ep_size": 8, "a2a_backend": "deepep", "workloads": DECODE}
RUNNER = "flashinfer_cutedsl"
#: Configurations as the tools write them.
CONFIGS = Path(__file__).resolve().parents[3] / "tests" / "quant" / "configs"


def machine(**packages: str) -> Environment:
    """A B200 with other packages."""
    return attrs.evolve(B200, packages=dict(B200.packages) | packages)


#: With the distribution of `deep_ep` whose dispatch rounds to NVFP4.
SENDS_NVFP4 = machine(deep_ep="0.1.2")


def without(module: str) -> Environment:
    """A B200 that lacks a package."""
    return attrs.evolve(B200, packages={name: version for name, version in B200.packages if name != module})


def plugins(*, deepep: bool = True) -> BackendManager:
    """This plugin, the built-in one, and the one that has dispatcher `deepep`."""
    made = manager()
    if deepep:
        made.register("cuda_deepgemm", deepgemm)
    return made


def plan_of(environment: Environment = B200, /, **fields: Any) -> MoEPlan:
    return make_plan(plugins(), LayerRequest(**SIZES | fields), environment)[0]


def decision_of(environment: Environment, /, **fields: Any) -> Decision:
    return decide(plugins(), LayerRequest(**SIZES | fields), environment)


def refusal(environment: Environment = B200, /, **fields: Any) -> str:
    with pytest.raises(ResolutionError) as caught:
        plan_of(environment, **fields)
    return str(caught.value)


def kernels(plan: MoEPlan) -> list[str]:
    return [route.runner.spec.short_name for route in plan.routes]


def test_tokens_as_they_came_get_the_wrapper() -> None:
    plan = plan_of(**ALONE)
    assert kernels(plan) == ["flashinfer_cutedsl.wrapper"]
    assert (plan.weight_layout, str(plan.routes[0].token_dtype)) == ("cutedsl_wrapper", "bf16")


@pytest.mark.parametrize("file", ["modelopt_nvfp4", "modelopt_file_nvfp4", "ct_nvfp4"])
def test_checkpoints_of_both_tools_are_one_scheme(file: str) -> None:
    config = json.loads((CONFIGS / f"{file}.json").read_text(encoding="utf-8"))
    quant = QuantScheme.from_hf(config, "model.layers.1.mlp.experts")
    assert kernels(plan_of(quant=quant)) == ["flashinfer_cutedsl.wrapper"]


@pytest.mark.parametrize("arch", ["sm100", "sm103"])
def test_blocks_of_rows_get_the_masked_gemm(arch: str) -> None:
    plan = plan_of(attrs.evolve(B200, arch=arch), quant=NVFP4, a2a_backend="none.masked")
    assert kernels(plan) == ["flashinfer_cutedsl.masked"]
    assert (plan.weight_layout, plan.routes[0].row_alignment) == ("cutedsl_masked", 128)


@pytest.mark.parametrize(
    ("environment", "fields", "dtype", "rule"),
    [
        pytest.param(SENDS_NVFP4, {}, "nvfp4/block_16_tiled", "input-global-scale", id="a build that sends it"),
        pytest.param(B200, {}, "bf16", "runner", id="a build that does not"),
        pytest.param(SENDS_NVFP4, {"dispatch_dtype": "bf16"}, "bf16", "pin", id="a pin above it"),
        pytest.param(SENDS_NVFP4, {"bf16_dispatch_variable": True}, "bf16", "variable", id="the deprecated variable"),
        pytest.param(SENDS_NVFP4, {"dispatch_dtype": "nvfp4"}, "nvfp4/block_16_tiled", "pin", id="a pin of it"),
    ],
)
def test_the_dtype_of_tokens_behind_deepep(
    environment: Environment, fields: dict[str, Any], dtype: str, rule: str
) -> None:
    (route,) = plan_of(environment, **TOGETHER | fields).routes
    assert (route.runner.spec.kernel, route.dispatcher.spec.name) == ("masked", "deepep")  # type: ignore[union-attr]
    assert (str(route.token_dtype), route.dtype_rule) == (dtype, rule)


def test_why_a_build_does_not_send_nvfp4_is_said() -> None:
    text = decision_of(B200, **TOGETHER).explain()
    assert "nvfp4 (preferred by input-global-scale) is not possible" in text
    assert "needs deep_ep >= 0.1.1, < 1, found deep_ep 1.2.1" in text
    assert "sgl-deep-ep" in text


@pytest.mark.error_path
def test_a_pin_of_what_the_build_does_not_send_is_an_error() -> None:
    assert "pinned nvfp4" in refusal(B200, **TOGETHER, dispatch_dtype="nvfp4")


@pytest.mark.parametrize("order", [(NVFP4, BF16), (BF16, NVFP4)], ids=["target first", "draft first"])
def test_an_unquantized_draft_layer_is_another_layer(order: tuple[Any, Any]) -> None:
    shared, made = plugins(), {}
    for quant in order:
        layer = LayerRequest(**SIZES | TOGETHER | {"quant": quant})
        made[quant], _ = make_plan(shared, layer, SENDS_NVFP4)
    (target,), (draft,) = made[NVFP4].routes, made[BF16].routes
    assert (target.runner.spec.name, target.token_dtype.dtype) == (RUNNER, "nvfp4")
    assert (draft.runner.spec.name, draft.token_dtype.dtype) == ("deep_gemm", "bf16")
    reasons = [
        str(reason)
        for spec in decision_of(SENDS_NVFP4, **TOGETHER | {"quant": BF16}).workloads[0].specs
        if spec.declared.full_name.startswith(f"{RUNNER}:{RUNNER}.masked")
        for reason in spec.reasons
    ]
    assert any(reason.startswith("scheme: needs nvfp4, found bf16") for reason in reasons)


@pytest.mark.error_path
def test_phases_that_would_need_both_layouts_are_refused() -> None:
    decode = attrs.evolve(DECODE, a2a_backend="none.masked")
    prefill = attrs.evolve(PREFILL, a2a_backend="none.standard")
    text = refusal(quant=NVFP4, runner_backend=RUNNER, workloads=(prefill, decode))
    assert "weight-layout: needs one weight layout for all workloads" in text
    assert "prefill: cutedsl_wrapper; decode: cutedsl_masked" in text


@pytest.mark.error_path
def test_rows_grouped_by_expert_are_another_format() -> None:
    text = refusal(quant=NVFP4, ep_size=8, a2a_backend="deepep.normal_unverified", runner_backend=RUNNER)
    assert "format: needs masked tokens, found contiguous tokens" in text


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("environment", "found"),
    [
        pytest.param(H100, "arch: needs sm100 or sm103, found sm90", id="h100"),
        pytest.param(CPU, "device: needs cuda, found cpu", id="cpu"),
        pytest.param(attrs.evolve(B200, arch="sm110"), "arch: needs sm100 or sm103, found sm110", id="a later one"),
        pytest.param(attrs.evolve(B200, arch="sm120"), "arch: needs sm100 or sm103, found sm120", id="a small one"),
        pytest.param(without("flashinfer"), "package: needs flashinfer >= 0.6.11", id="no library"),
        pytest.param(without("cutlass"), "package: needs cutlass, found not installed", id="no compiler"),
        pytest.param(machine(flashinfer="0.6.10"), "version: needs flashinfer >= 0.6.11", id="an old library"),
    ],
)
@pytest.mark.parametrize("a2a", ["none.standard", "none.masked"])
def test_other_machines_are_refused_with_every_reason(environment: Environment, found: str, a2a: str) -> None:
    assert found in refusal(environment, quant=NVFP4, runner_backend=RUNNER, a2a_backend=a2a)


def test_a_later_generation_has_kernels_in_a_later_release() -> None:
    rubin = attrs.evolve(B200, arch="sm107")
    assert kernels(plan_of(rubin, **ALONE)) == ["flashinfer_cutedsl.wrapper_rubin"]
    assert kernels(plan_of(rubin, quant=NVFP4, a2a_backend="none.masked")) == ["flashinfer_cutedsl.masked_rubin"]
    assert "needs flashinfer >= 0.7.2" in refusal(attrs.evolve(EARLIER, arch="sm107"), **ALONE, runner_backend=RUNNER)


def test_another_runner_serves_where_it_is_allowed_to_and_says_so() -> None:
    with pytest.warns(PlanWarning, match="asked for runner flashinfer_cutedsl.*needs sm100 or sm103, found sm90"):
        plan = plan_of(H100, **ALONE, runner_backend=RUNNER, allow_fallback=True)
    assert plan.routes[0].runner.spec.name != RUNNER
    assert any("fallback" in note for note in plan.notes)


@pytest.mark.parametrize("environment", [B200, H100, CPU], ids=["b200", "h100", "cpu"])
def test_every_kernel_and_its_generations_are_explained(environment: Environment) -> None:
    text = decision_of(environment, quant=NVFP4).explain(full=True)
    for kernel in ("masked", "masked_overlap", "wrapper", "two_stage", "wrapper_rubin"):
        assert f"{RUNNER}:{RUNNER}.{kernel}" in text


def test_a_library_of_the_dispatcher_that_is_missing_is_explained() -> None:
    fields = TOGETHER | {"a2a_backend": None, "runner_backend": RUNNER}
    # Another transport writes blocks of rows too.
    assert str(plan_of(without("deep_ep"), **fields).routes[0].candidate.a2a_backend) == "torch_alltoall"
    (workload,) = decision_of(without("deep_ep"), **fields).workloads
    rejected = {spec.declared.full_name: list(map(str, spec.reasons)) for spec in workload.specs}
    for mode in ("low_latency_unverified", "low_latency_nvfp4_unverified"):
        assert any("package: needs deep_ep" in reason for reason in rejected[f"cuda_deepgemm:deepep.{mode}"])


@pytest.mark.error_path
def test_a_dispatcher_that_nobody_declares_is_named() -> None:
    layer = LayerRequest(**SIZES | TOGETHER, runner_backend=f"{RUNNER}.masked")
    with pytest.raises(UnknownNameError, match=r"'deepep'.* can be joined to: none\.masked, torch_alltoall\.masked"):
        make_plan(plugins(deepep=False), layer, B200)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({"quant": NVFP4_W4A16}, "scheme: needs nvfp4, found nvfp4_w4a16", id="activations left alone"),
        pytest.param(
            {"quant": attrs.evolve(NVFP4, activation_scaling="dynamic")},
            "scheme: needs nvfp4, found fp4(",
            id="dynamic",
        ),
        pytest.param({"quant": LayerQuant(NVFP4, NVFP4_W4A16)}, "scheme: needs nvfp4", id="one projection"),
        pytest.param({"activation": SWIGLU_OAI}, "activation: needs silu-gated", id="a clamp"),
        pytest.param({"activation": ActivationSpec(limit=7.0)}, "activation: needs silu-gated", id="a limit"),
        pytest.param({"activation": GEGLU}, "activation: needs silu-gated", id="gelu"),
        pytest.param({"activation": RELU2, "a2a_backend": "none.standard"}, "found relu2", id="relu2 in the wrapper"),
        pytest.param({"dtype": "fp16"}, "dtype: needs layer dtype bf16, found fp16", id="fp16"),
        pytest.param({"bias": True}, "bias: needs a layer without expert biases", id="biases"),
        pytest.param({"weight_on_input": True}, "weighting: needs router weights on the output", id="input weights"),
        pytest.param({"post_norm": True}, "post-norm: needs no norm", id="a norm"),
        pytest.param({"hidden_size": 7232}, "hidden_size multiple_of 128, found hidden_size 7232", id="hidden"),
        pytest.param({"intermediate_size": 2080}, "intermediate_size multiple_of 64", id="intermediate"),
        pytest.param({"tp_size": 64}, "intermediate_size multiple_of 64, found intermediate_size 32", id="a share"),
    ],
)
def test_what_no_kernel_computes_is_refused(fields: dict[str, Any], text: str) -> None:
    assert text in refusal(**ALONE | {"runner_backend": RUNNER} | fields)


def test_experts_without_gate_are_computed_on_blocks_of_rows() -> None:
    plan = plan_of(quant=NVFP4, activation=RELU2, runner_backend=RUNNER)
    assert kernels(plan) == ["flashinfer_cutedsl.masked"]


def test_equal_bits_take_the_sum_in_two_stages_where_the_release_has_it() -> None:
    assert kernels(plan_of(B200, **ALONE, a2a_backend="none.standard", deterministic=True)) == [
        "flashinfer_cutedsl.two_stage"
    ]
    # Nothing on blocks of rows adds atomically.
    assert kernels(plan_of(B200, quant=NVFP4, a2a_backend="none.masked", deterministic=True)) == [
        "flashinfer_cutedsl.masked"
    ]


@pytest.mark.error_path
def test_equal_bits_are_refused_where_the_release_has_none() -> None:
    text = refusal(EARLIER, **ALONE, a2a_backend="none.standard", runner_backend=RUNNER, deterministic=True)
    assert "wrapper: determinism: needs bitwise repeatable results" in text
    assert "two_stage: version: needs flashinfer >= 0.7.2, found flashinfer 0.6.11" in text
