"""What is chosen with this plugin beside the built-in ones, and what a decision says against it."""

from __future__ import annotations

import json
import warnings
from typing import Any

import attrs
import pytest
from moe_plugin_deepgemm import plugin

from moe_core import LayerRequest, Workload
from moe_core.activation import RELU2, SWIGLU_OAI
from moe_core.backends.torch import plugin as torch_plugin
from moe_core.backends.triton import plugin as triton_plugin
from moe_core.decision import Decision
from moe_core.environment import PRESETS, Environment
from moe_core.errors import ResolutionError
from moe_core.manager import BackendManager
from moe_core.measurement_sources import SHIPPED
from moe_core.measurements import shape_key
from moe_core.plan import MoEPlan
from moe_core.planner import PlanWarning, make_plan
from moe_core.quant import BF16, FP8_BLOCK128, FP8_BLOCK128_UE8M0, FP8_CHANNEL
from moe_core.token_ranges import WORTH_A_RANGE

H100 = PRESETS["h100"]
INSTALL = "pip install sgl-deep-gemm or tokenspeed-deepgemm"
DECODE = Workload(phase="decode", max_tokens=256, graph_capture=True)
PREFILL = Workload(phase="prefill", max_tokens=8192)


def machine(**changes: Any) -> Environment:
    """An H100 with other packages (None: not there), or another device."""
    packages = dict(H100.packages) | changes.pop("packages", {})
    kept = {name: version for name, version in packages.items() if version is not None}
    return attrs.evolve(H100, packages=kept, **changes)


def decide(environment: Environment = H100, **fields: Any) -> tuple[MoEPlan, Decision]:
    manager = BackendManager()
    for name, module in (("torch", torch_plugin), ("triton", triton_plugin), ("cuda_deepgemm", plugin)):
        manager.register(name, module)
    sizes = {"num_experts": 128, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768, "quant": BF16}
    return make_plan(manager, LayerRequest(**{**sizes, **fields}), environment)


def refusal(environment: Environment = H100, runner: str = "deep_gemm", **fields: Any) -> str:
    with pytest.raises(ResolutionError) as caught:
        decide(environment, runner_backend=runner, **fields)
    return str(caught.value)


@pytest.mark.parametrize("quant", [BF16, FP8_BLOCK128], ids=["bf16", "fp8"])
@pytest.mark.parametrize("mode", ["contiguous", "masked"])
def test_a_pin_gets_it(quant: Any, mode: str) -> None:
    plan, _ = decide(quant=quant, runner_backend="deep_gemm", a2a_backend=f"none.{mode}", workloads=DECODE)
    (route,) = plan.routes
    kernel, tokens = ("bf16", "bf16") if quant == BF16 else ("fp8", "fp8/column_128")
    assert route.runner.full_name == f"cuda_deepgemm:deep_gemm.{kernel}_{mode}"
    assert (route.row_alignment, plan.weight_layout, str(route.token_dtype)) == (128, "canonical", tokens)


def test_its_routes_share_their_weights_with_those_of_triton() -> None:
    prefill = attrs.evolve(PREFILL, a2a_backend="none.contiguous")
    decode = attrs.evolve(DECODE, a2a_backend="none.masked")
    plan, _ = decide(prefer=["cuda_deepgemm"], workloads=(prefill, decode))
    runners = {route.phase: route.runner.spec.short_name for route in plan.routes}
    assert runners == {"prefill": "deep_gemm.bf16_contiguous", "decode": "deep_gemm.bf16_masked"}
    mixed, _ = decide(prefer=["cuda_deepgemm"], workloads=(prefill, attrs.evolve(DECODE, a2a_backend="none.standard")))
    assert {route.runner.plugin for route in mixed.routes} == {"cuda_deepgemm", "triton"}
    assert mixed.weight_layout == plan.weight_layout == "canonical"


def test_unmeasured_it_is_not_preferred_to_one_kernel_for_the_whole_layer() -> None:
    plan, _ = decide()
    assert plan.routes[0].runner.full_name == "triton:triton.fused"


@pytest.mark.parametrize("arch", ["sm100", "sm103"])
def test_blackwell_is_declared_and_ranked_as_unverified(arch: str) -> None:
    fields = {"quant": FP8_BLOCK128_UE8M0, "runner_backend": "deep_gemm"}
    plan, _ = decide(attrs.evolve(PRESETS["b200"], arch=arch), **fields)
    runner = plan.routes[0].runner.spec
    assert (runner.kernel, runner.tier, plan.weight_layout) == (
        "fp8_contiguous_unverified",
        "generic",
        "deepgemm_ue8m0",
    )
    assert "scheme" in refusal(PRESETS["b200"], quant=FP8_BLOCK128)
    assert "scheme" in refusal(quant=FP8_BLOCK128_UE8M0)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (None, "needs deep_gemm >= 0.1.3, not >=1,<2.1, found not installed"),
        ("0.1.0", "found deep_gemm 0.1.0"),
        ("1.0.0", "found deep_gemm 1.0.0"),
    ],
)
def test_a_pin_without_the_library_says_what_to_install(version: str | None, expected: str) -> None:
    text = refusal(machine(packages={"deep_gemm": version}))
    assert expected in text
    assert INSTALL in text


@pytest.mark.parametrize("version", ["0.1.3", "0.1.5.post1", "2.1.1", "2.5.0.post20260604"])
def test_versions_of_every_distribution_serve(version: str) -> None:
    plan, _ = decide(machine(packages={"deep_gemm": version}), runner_backend="deep_gemm")
    assert plan.routes[0].runner.spec.name == "deep_gemm"


@pytest.mark.error_path
def test_with_fallback_triton_runs_and_the_decision_says_so() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        plan, decision = decide(
            machine(packages={"deep_gemm": None}), runner_backend="deep_gemm", allow_fallback=True, workloads=DECODE
        )
    assert plan.routes[0].runner.full_name == "triton:triton.fused"
    (warning,) = (str(entry.message) for entry in caught if entry.category is PlanWarning)
    assert "deep_gemm" in warning
    text = decision.explain()
    assert "deep_gemm >= 0.1.3" in text
    assert INSTALL in text


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"bias": True}, "bias", "expert biases"),
        ({"dtype": "fp16", "quant": FP8_BLOCK128}, "dtype", "layer dtype bf16"),
        ({"quant": FP8_CHANNEL}, "scheme", "fp8_block128"),
        ({"intermediate_size": 96}, "limit", "intermediate_size multiple_of 64"),
        ({"quant": FP8_BLOCK128, "intermediate_size": 192}, "limit", "intermediate_size multiple_of 128"),
        ({"deterministic": True}, "determinism", "not declared deterministic"),
        ({"dispatch_dtype": "fp8"}, "dispatch-dtype", "bf16"),
        # No known build of the library takes what that needs (`test_library`).
        ({"workloads": Workload(down_gemm_overlap=True)}, "overlap", "before the second projection ends"),
    ],
)
def test_what_it_does_not_do_is_refused_with_a_reason(fields: dict[str, Any], code: str, said: str) -> None:
    text = refusal(**fields)
    assert code in text
    assert said in text


@pytest.mark.parametrize("activation", [SWIGLU_OAI, RELU2], ids=str)
def test_clamps_and_other_activations_are_computed(activation: Any) -> None:
    plan, _ = decide(activation=activation, runner_backend="deep_gemm")
    assert plan.routes[0].runner.spec.name == "deep_gemm"


@pytest.mark.error_path
def test_older_devices_are_refused_by_name() -> None:
    text = refusal(machine(arch="sm80"))
    assert "sm90" in text
    assert "sm80" in text


_SIZES = ((128, 8, 2048, 768), (256, 8, 7168, 2048), (8, 2, 4096, 14336), (512, 10, 4096, 1024))
_CARD = attrs.evolve(H100, device_name="NVIDIA H100 80GB HBM3")
_TIMES = json.loads((SHIPPED / "h100.json").read_text())["times"]


@pytest.mark.parametrize("quant", [BF16, FP8_BLOCK128], ids=["bf16", "fp8"])
@pytest.mark.parametrize("sizes", _SIZES, ids=str)
def test_measured_times_give_it_the_token_counts_where_it_is_fastest(sizes: tuple[int, ...], quant: Any) -> None:
    fields = dict(zip(("num_experts", "top_k", "hidden_size", "intermediate_size"), sizes, strict=True))
    plan, _ = decide(_CARD, quant=quant, workloads=Workload(max_tokens=8192), **fields)
    times = _TIMES[shape_key(plan.request)]
    for count in {int(count) for name, found in times.items() if "deep_gemm" in name for count in found}:
        route = next(route for route in plan.routes if count <= (route.max_tokens or 8192))
        measured = {name: found[str(count)] for name, found in times.items() if str(count) in found}
        # Another range of token counts has to be worth it.
        assert measured[route.candidate.full_name] <= (1 + WORTH_A_RANGE) * min(measured.values())
