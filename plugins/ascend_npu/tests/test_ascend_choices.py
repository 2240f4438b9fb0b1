"""What runs on an Ascend machine, in which dtype tokens travel, and what is refused with which reason."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from ascend_layers import A2, A2_HOSTS, A3, manager, plan_of, request

from moe_core import LayerRequest, Workload
from moe_core.activation import RELU2, SWIGLU_OAI, ActivationSpec
from moe_core.environment import Environment
from moe_core.errors import ResolutionError
from moe_core.planner import PlanWarning, make_plan
from moe_core.quant import BF16, FP8_BLOCK128, NVFP4, W4A4_INT4, W4A8_INT8, W8A8_INT8, LayerQuant

PHASES = (Workload(phase="prefill", max_tokens=4096), Workload(phase="decode", max_tokens=128))
DECODE = Workload(phase="decode", max_tokens=128)
CLAMPED = ActivationSpec(limit=7.0)
MIXED = LayerQuant(W4A4_INT4, W8A8_INT8)


@pytest.mark.parametrize(
    ("quant", "kernel", "dtype"),
    [
        (BF16, "bf16", "bf16"),
        (W8A8_INT8, "w8a8", "int8/token"),
        (W4A8_INT8, "w4a8", "int8/token"),
        (LayerQuant(W4A8_INT8, W8A8_INT8), "w4a8", "int8/token"),
        # Only the experts make int4; no dispatch sends it.
        (W4A4_INT4, "w4a4", "bf16"),
        (MIXED, "w4a4", "bf16"),
    ],
    ids=str,
)
def test_one_plan_serves_prefill_and_decode(quant: Any, kernel: str, dtype: str) -> None:
    plan = plan_of(quant=quant, a2a_backend="deepep", workloads=PHASES)
    decode, prefill = plan.routes
    assert (decode.phase, decode.dispatcher.spec.short_name) == ("decode", "deepep.low_latency")
    assert (prefill.phase, prefill.dispatcher.spec.short_name) == ("prefill", "deepep.normal")
    for route in plan.routes:
        assert route.runner.full_name == f"ascend_npu:ascend.{kernel}"
        assert (str(route.token_dtype), route.dtype_rule) == (dtype, "runner")
    assert plan.output_is_complete


@pytest.mark.parametrize("mode", [1, 2])
def test_a_fused_plan_has_no_dispatcher(mode: int) -> None:
    plan = plan_of(quant=W8A8_INT8, a2a_backend="ascend_fuseep", runner_backend=f"fuseep.mode{mode}", workloads=DECODE)
    (route,) = plan.routes
    assert (route.dispatcher, route.runner.spec.kernel) == (None, f"mode{mode}")
    assert plan.weight_layout == f"ascend_fuseep_{mode}"
    assert str(route.token_dtype) == "bf16"


@pytest.mark.error_path
@pytest.mark.parametrize(("a2a", "runner"), [("ascend_fuseep", "ascend"), ("deepep", "fuseep")])
def test_who_wants_a_dispatcher_beside_the_fused_call_is_told_that_there_is_none(a2a: str, runner: str) -> None:
    with pytest.raises(ResolutionError, match=r"; fuseep\.mode1 moves tokens itself: it has no dispatcher"):
        plan_of(quant=W8A8_INT8, a2a_backend=a2a, runner_backend=runner, workloads=DECODE)


def test_the_fused_call_is_for_those_who_ask() -> None:
    assert plan_of(quant=W8A8_INT8, workloads=DECODE).routes[0].runner.spec.name == "ascend"
    assert plan_of(quant=W8A8_INT8, workloads=DECODE, prefer=["ascend_fuseep"]).routes[0].runner.spec.name == "fuseep"


def test_wider_layers_get_the_fused_mode_that_takes_them() -> None:
    fields = {"quant": W8A8_INT8, "a2a_backend": "ascend_fuseep", "workloads": DECODE}
    assert plan_of(**fields, intermediate_size=3072).weight_layout == "ascend_fuseep_1"
    assert plan_of(**fields, intermediate_size=3136).weight_layout == "ascend_fuseep_2"


@pytest.mark.parametrize(
    ("machine", "fields", "mode", "dtype"),
    [
        pytest.param(A3, {}, "normal", "int8/token", id="a3"),
        pytest.param(A2, {"hidden_size": 7168}, "a2_normal", "int8/token", id="a2"),
        pytest.param(A2, {"workloads": DECODE}, "a2_low_latency", "int8/token", id="a2 low latency"),
        pytest.param(A2_HOSTS, {"hidden_size": 7168, "ep_size": 16}, "a2_normal_two_hosts", "bf16", id="two a2 hosts"),
    ],
)
def test_the_mode_of_a_machine(machine: Environment, fields: dict[str, Any], mode: str, dtype: str) -> None:
    (route,) = plan_of(machine, quant=W8A8_INT8, a2a_backend="deepep", **fields).routes
    assert (route.dispatcher.spec.mode, str(route.token_dtype)) == (mode, dtype)


def test_captured_decoding_uses_the_mode_that_does_not_wait() -> None:
    captured = Workload(phase="decode", max_tokens=128, graph_capture=True)
    plan = plan_of(quant=W8A8_INT8, a2a_backend="deepep", workloads=captured)
    assert plan.routes[0].dispatcher.spec.mode == "low_latency"


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("machine", "fields", "reason"),
    [
        pytest.param(A3, {"quant": W4A4_INT4}, "scheme: needs w8a8_int8, found w4a4_int4", id="w4a4"),
        pytest.param(A3, {"quant": W4A8_INT8}, "scheme: needs w8a8_int8, found w4a8_int8", id="w4a8"),
        pytest.param(A3, {"quant": MIXED}, "scheme: needs w8a8_int8, found w4a4_int4/w8a8_int8", id="mixed"),
        pytest.param(A3, {"quant": FP8_BLOCK128}, "scheme: needs w8a8_int8, found fp8_block128", id="fp8"),
        pytest.param(A3, {}, "scheme: needs w8a8_int8, found bf16", id="bf16"),
        pytest.param(
            A3,
            {"quant": W8A8_INT8, "activation": CLAMPED},
            "activation: needs silu-gated, found silu-gated(limit=7.0)",
            id="clamped",
        ),
        pytest.param(A3, {"quant": W8A8_INT8, "activation": SWIGLU_OAI}, "activation: needs silu-gated", id="alpha"),
        pytest.param(A3, {"quant": W8A8_INT8, "activation": RELU2}, "activation: needs silu-gated", id="relu2"),
        pytest.param(A3, {"quant": W8A8_INT8, "bias": True}, "bias: needs a layer without expert biases", id="bias"),
        pytest.param(A3, {"quant": W8A8_INT8, "dtype": "fp16"}, "dtype: needs layer dtype bf16, found fp16", id="fp16"),
        pytest.param(A2, {"quant": W8A8_INT8}, "arch: needs a3, found a2", id="a2"),
        pytest.param(A3, {"quant": W8A8_INT8, "ep_size": 1}, "limit: needs ep_size >= 2, found ep_size 1", id="alone"),
        pytest.param(
            A3,
            {"quant": W8A8_INT8, "token_placement": "replicated"},
            "tokens: needs distributed tokens, found replicated",
            id="replicated",
        ),
    ],
)
def test_the_fused_call_is_refused_with_the_reason(machine: Environment, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ResolutionError) as caught:
        plan_of(machine, a2a_backend="ascend_fuseep", workloads=DECODE, **fields)
    decision = caught.value.decision
    if decision is None or reason not in str(caught.value):
        raise AssertionError(str(caught.value))
    for mode in (1, 2):
        if not any(reason in str(against) for against in decision.reasons_of(f"ascend_npu:fuseep.mode{mode}")):
            raise AssertionError(decision.explain(full=True))


@pytest.mark.error_path
@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_fp16_layers_are_refused_between_ranks(mode: str) -> None:
    with pytest.raises(ResolutionError, match=rf"deepep\.{mode}: dtype: needs layer dtype bf16, found fp16"):
        plan_of(dtype="fp16", a2a_backend=f"deepep.{mode}", workloads=DECODE)


@pytest.mark.error_path
def test_prefill_is_no_work_for_the_low_latency_mode() -> None:
    with pytest.raises(ResolutionError, match="phase: needs decode or verify, found prefill"):
        plan_of(quant=W8A8_INT8, a2a_backend="deepep.low_latency", workloads=PHASES[0])


@pytest.mark.error_path
def test_host_counts_cannot_be_captured() -> None:
    captured = Workload(phase="decode", max_tokens=128, graph_capture=True)
    with pytest.raises(ResolutionError, match="graph: needs a graph-safe backend"):
        plan_of(quant=W8A8_INT8, a2a_backend="deepep.normal", workloads=captured)


@pytest.mark.error_path
def test_a_fused_decode_beside_a_prefill_of_another_layout() -> None:
    phases = (PHASES[0], Workload(phase="decode", max_tokens=128, a2a_backend="ascend_fuseep"))
    with pytest.raises(ResolutionError, match="weight-layout"):
        plan_of(quant=W8A8_INT8, a2a_backend="deepep", workloads=phases)


class TestDispatchDtype:
    """Asked for explicitly, adjusted as documented, or refused."""

    def plan(self, machine: Environment = A3, **fields: Any) -> Any:
        return plan_of(machine, a2a_backend="deepep", hidden_size=7168, **fields)

    @pytest.mark.parametrize("asked", ["bf16", "int8"])
    def test_an_explicit_choice_is_above_all(self, asked: str) -> None:
        (route,) = self.plan(quant=W8A8_INT8, dispatch_dtype=asked, bf16_dispatch_variable=True).routes
        assert (route.token_dtype.dtype, route.dtype_rule, route.dtype_requested) == (asked, "pin", None)

    def test_the_deprecated_variable_is_next(self) -> None:
        (route,) = self.plan(quant=W8A8_INT8, bf16_dispatch_variable=True).routes
        assert (str(route.token_dtype), route.dtype_rule) == ("bf16", "variable")

    @pytest.mark.parametrize("machine", [A2, A3], ids=["a2", "a3"])
    @pytest.mark.parametrize("quant", [W8A8_INT8, W4A8_INT8], ids=str)
    def test_fp8_is_int8_here_and_the_plan_says_so(self, machine: Environment, quant: Any) -> None:
        with pytest.warns(PlanWarning, match="pinned fp8 is int8 on npu") as caught:
            plan = self.plan(machine, quant=quant, dispatch_dtype="fp8")
        assert len(caught) == 1
        (route,) = plan.routes
        assert (str(route.token_dtype), route.dtype_requested) == ("int8/token", "fp8")
        assert any("pinned fp8" in note for note in plan.notes)

    @pytest.mark.error_path
    def test_unless_nothing_may_be_adjusted(self) -> None:
        with pytest.raises(ResolutionError, match="needs pinned fp8, found npu uses int8/token instead"):
            self.plan(quant=W8A8_INT8, dispatch_dtype="fp8", strict=True)

    @pytest.mark.error_path
    @pytest.mark.parametrize("quant", [BF16, W4A4_INT4], ids=str)
    def test_fp8_for_experts_that_read_bf16_alone(self, quant: Any) -> None:
        with pytest.raises(ResolutionError, match="pinned fp8, found only bf16 can be sent and read"):
            self.plan(quant=quant, dispatch_dtype="fp8")

    @pytest.mark.error_path
    @pytest.mark.parametrize("quant", [BF16, W8A8_INT8, W4A8_INT8, W4A4_INT4], ids=str)
    @pytest.mark.parametrize("asked", ["nvfp4", "mxfp8", "int4"])
    def test_what_no_mode_sends_is_an_error(self, asked: str, quant: Any) -> None:
        with pytest.raises(ResolutionError, match=f"dispatch-dtype: needs pinned {asked}"):
            self.plan(quant=quant, dispatch_dtype=asked)

    @pytest.mark.error_path
    def test_an_nvfp4_checkpoint_finds_no_runner_of_this_plugin(self) -> None:
        with pytest.raises(ResolutionError, match=r"ascend\.w8a8, \.w8a8_nd: scheme: needs w8a8_int8, found nvfp4"):
            self.plan(quant=NVFP4, runner_backend="ascend")

    @pytest.mark.parametrize("order", [1, -1])
    def test_layers_do_not_influence_each_other(self, order: int) -> None:
        wanted = [(W8A8_INT8, "int8/token"), (BF16, "bf16"), (W4A4_INT4, "bf16"), (W4A8_INT8, "int8/token")]
        everyone = manager()
        for quant, dtype in wanted[::order] * 2:
            layer: LayerRequest = request(quant=quant, a2a_backend="deepep", workloads=PHASES)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                plan, _ = make_plan(everyone, layer, A3)
            assert {str(route.token_dtype) for route in plan.routes} == {dtype}
