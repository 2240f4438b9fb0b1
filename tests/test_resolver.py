from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from fakes import (
    A2,
    A3,
    BF16_TOKENS,
    CPU,
    CUDA_DEEPGEMM,
    DECODE,
    FP8_COLUMN,
    FP8_ROW,
    PREFILL_AND_DECODE,
    SM80,
    SM90,
    SM100,
    SM110,
    TORCH,
    VENDORS,
    chosen,
    decide,
    dispatcher,
    expect,
    plugin,
    request,
    runner,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import measured

from moe_core.activation import RELU2, SWIGLU_OAI, ActivationSpec
from moe_core.backends.torch.plugin import declare_backends as shipped_torch
from moe_core.backends.triton.plugin import declare_backends as shipped_triton
from moe_core.environment import Environment, load_environment
from moe_core.errors import PluginConflictError, UnknownNameError
from moe_core.explanation import why
from moe_core.measurements import Measurement, MeasurementTable, Time, shape_key
from moe_core.quant import (
    BF16,
    FP8_BLOCK128,
    FP8_TENSOR,
    FP16,
    MXFP4,
    NVFP4,
    NVFP4_W4A16,
    W4A4_INT4,
    W4A8_INT8,
    W8A8_INT8,
    W8A16_INT8,
    QuantScheme,
)
from moe_core.request import LayerRequest, Workload
from moe_core.resolver import resolve
from moe_core.specs import Limit, PluginSpec, Program, Requirement, Setting
from moe_core.vocabulary import REASON_CODES

MASKED_BF16 = "cuda_deepgemm:deepep.low_latency + cuda_deepgemm:deep_gemm.masked_bf16"
CONTIGUOUS_BF16 = "cuda_deepgemm:deepep.normal + cuda_deepgemm:deep_gemm.contiguous_bf16"
MASKED_TORCH = "cuda_deepgemm:deepep.low_latency + torch:torch.masked"
V1, V2 = (f"flashinfer_cutedsl:flashinfer_cutedsl.{kernel}" for kernel in ("v1", "v2"))
WITHOUT_DEEP_GEMM = attrs.evolve(SM90, packages={"torch": "2.11.0", "deep_ep": "1.2.1"})
OLD_DEEP_GEMM = attrs.evolve(SM90, packages={"torch": "2.11.0", "deep_ep": "1.2.1", "deep_gemm": "2.3.9"})
CLAMPED = ActivationSpec(limit=7.0)


@pytest.mark.parametrize(
    ("fields", "machine", "expected"),
    [
        pytest.param(
            {"a2a_backend": "deepep", "workloads": PREFILL_AND_DECODE},
            SM90,
            [CONTIGUOUS_BF16, MASKED_BF16],
            id="bf16: contiguous prefill and masked decode over one layout",
        ),
        pytest.param(
            {"a2a_backend": "deepep", "bias": True, "workloads": DECODE},
            SM90,
            [MASKED_TORCH],
            id="biases are not given to a kernel without them",
        ),
        pytest.param(
            {"a2a_backend": "deepep", "activation": RELU2, "workloads": DECODE},
            SM90,
            [MASKED_TORCH],
            id="another activation",
        ),
        pytest.param({"dtype": "fp16"}, SM90, ["torch:none.standard + torch:torch.standard"], id="fp16 weights"),
        pytest.param(
            {"quant": NVFP4, "a2a_backend": "deepep", "workloads": DECODE},
            SM100,
            [f"cuda_deepgemm:deepep.low_latency + {V1}"],
            id="nvfp4 over deepep is v1",
        ),
        pytest.param({"quant": NVFP4, "a2a_backend": "none"}, SM100, [f"torch:none.standard + {V2}"], id="nvfp4 is v2"),
        pytest.param(
            {"quant": W8A8_INT8, "a2a_backend": "ascend_fuseep", "runner_backend": "fuseep.mode2"},
            A3,
            ["ascend_npu:fuseep.mode2"],
            id="fused has no dispatcher",
        ),
        pytest.param(
            {"quant": W8A8_INT8, "a2a_backend": "ascend_fuseep", "intermediate_size": 3072},
            A3,
            ["ascend_npu:fuseep.mode1"],
            id="2I of 6144 in mode 1",
        ),
        pytest.param(
            {"quant": W8A8_INT8, "a2a_backend": "deepep.normal"},
            A3,
            ["ascend_npu:deepep.normal + ascend_npu:ascend.w8a8"],
            id="w8a8 on deepep",
        ),
        pytest.param({"top_k": 11, "a2a_backend": "deepep", "workloads": DECODE}, SM90, [MASKED_BF16], id="top_k 11"),
    ],
)
def test_what_runs(fields: dict[str, Any], machine: Environment, expected: list[str]) -> None:
    assert chosen(decide(request(**fields), machine)) == expected


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "machine", "name", "reason"),
    [
        pytest.param(
            {}, SM80, "cuda_deepgemm:deep_gemm.masked_bf16", "arch: needs sm90 or sm100, found sm80", id="sm80"
        ),
        pytest.param({"quant": NVFP4}, SM90, V1, "arch: needs sm100 or sm103, found sm90", id="nvfp4 v1 on sm90"),
        pytest.param({"quant": NVFP4}, SM90, V2, "arch: needs sm100 or sm103, found sm90", id="nvfp4 v2 on sm90"),
        pytest.param({"quant": NVFP4}, SM110, V1, "arch: needs sm100 or sm103, found sm110", id="a set is no range"),
        pytest.param(
            {"top_k": 12, "workloads": DECODE},
            SM90,
            "cuda_deepgemm:deepep.low_latency",
            "limit: needs top_k <= 11, found top_k 12",
            id="top_k",
        ),
        pytest.param(
            {"workloads": Workload(phase="decode", max_tokens=1025)},
            SM90,
            "cuda_deepgemm:deepep.low_latency",
            "limit: needs max_tokens <= 1024, found max_tokens 1025; send the tokens in chunks",
            id="tokens",
        ),
        pytest.param(
            {"quant": W4A4_INT4},
            A3,
            "ascend_npu:fuseep.mode1",
            "scheme: needs w8a8_int8, found w4a4_int4",
            id="fused w4a4",
        ),
        pytest.param(
            {"quant": W4A8_INT8},
            A3,
            "ascend_npu:fuseep.mode2",
            "scheme: needs w8a8_int8, found w4a8_int8",
            id="fused w4a8",
        ),
        pytest.param({}, A3, "ascend_npu:fuseep.mode1", "scheme: needs w8a8_int8, found bf16", id="fused bf16"),
        pytest.param(
            {"quant": W8A8_INT8, "activation": CLAMPED},
            A3,
            "ascend_npu:fuseep.mode1",
            "activation: needs silu-gated, found silu-gated(limit=7.0)",
            id="fused clamp",
        ),
        pytest.param(
            {"quant": W8A8_INT8, "intermediate_size": 3136},
            A3,
            "ascend_npu:fuseep.mode1",
            "limit: needs intermediate_size <= 3072, found intermediate_size 3136; mode 2 takes more; or "
            "tp_size 2, 4, 7 fit",
            id="2I of 6272",
        ),
        pytest.param({"quant": W8A8_INT8}, A2, "ascend_npu:fuseep.mode1", "arch: needs a3, found a2", id="fused on a2"),
        pytest.param(
            {"dtype": "fp16"},
            A3,
            "ascend_npu:deepep.normal",
            "dtype: needs layer dtype bf16, found fp16",
            id="fp16 on ascend",
        ),
        pytest.param(
            {"activation": SWIGLU_OAI},
            SM90,
            "cuda_deepgemm:deep_gemm.masked_bf16",
            "activation: needs silu-gated, found silu-gated(alpha=1.702, limit=7.0, beta=1.0)",
            id="clamped swiglu",
        ),
        pytest.param(
            {"quant": NVFP4},
            SM100,
            f"cuda_deepgemm:deepep.normal + {V1}",
            "format: needs masked tokens, found contiguous tokens",
            id="normal with v1",
        ),
        pytest.param(
            {},
            WITHOUT_DEEP_GEMM,
            "cuda_deepgemm:deep_gemm.masked_bf16",
            "package: needs deep_gemm >= 2.4, found not installed; pip install deep-gemm",
            id="missing package",
        ),
        pytest.param(
            {},
            OLD_DEEP_GEMM,
            "cuda_deepgemm:deep_gemm.masked_bf16",
            "version: needs deep_gemm >= 2.4, found deep_gemm 2.3.9; pip install deep-gemm",
            id="old package",
        ),
    ],
)
def test_what_is_refused_and_why(fields: dict[str, Any], machine: Environment, name: str, reason: str) -> None:
    reasons = [str(found) for found in decide(request(**fields), machine).reasons_of(name)]
    expect(reason in reasons, f"{reason!r} not in {reasons}")


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "machine"),
    [
        ({"runner_backend": "deep_gemm", "a2a_backend": "deepep"}, WITHOUT_DEEP_GEMM),
        ({"runner_backend": "deep_gemm", "dtype": "fp16"}, SM90),
        ({"runner_backend": "deep_gemm", "bias": True}, SM90),
        ({"quant": W4A4_INT4, "a2a_backend": "ascend_fuseep"}, A3),
        ({"quant": W8A8_INT8, "a2a_backend": "ascend_fuseep"}, A2),
        ({"quant": W8A8_INT8, "a2a_backend": "ascend_fuseep", "activation": CLAMPED}, A3),
        ({"dtype": "fp16", "a2a_backend": "deepep"}, A3),
        ({"quant": NVFP4, "a2a_backend": "deepep.normal", "runner_backend": "flashinfer_cutedsl"}, SM100),
    ],
)
def test_a_pin_that_cannot_run_is_an_error_and_no_other_combination(
    fields: dict[str, Any], machine: Environment
) -> None:
    decision = decide(request(**fields), machine)
    expect(not decision.is_feasible)
    expect(decision.error == "nothing fits workload any", decision.error)
    expect(not decision.workloads[0].ranked)


@pytest.mark.parametrize(
    ("fields", "machine", "expected", "parts"),
    [
        pytest.param(
            {"a2a_backend": "deepep", "runner_backend": "deep_gemm", "workloads": DECODE},
            WITHOUT_DEEP_GEMM,
            MASKED_TORCH,
            ["kept a2a deepep,", "package: needs deep_gemm >= 2.4, found not installed"],
            id="the transport stays",
        ),
        pytest.param(
            {"a2a_backend": "deepep", "runner_backend": "deep_gemm", "dispatch_dtype": "fp8", "workloads": DECODE},
            SM90,
            MASKED_BF16,
            ["kept a2a deepep, runner deep_gemm,", "pinned fp8, found only bf16"],
            id="only the dtype goes",
        ),
        pytest.param(
            {"a2a_backend": "deepep", "runner_backend": "torch", "dispatch_dtype": "fp8"},
            CPU,
            "torch:none.standard + torch:torch.standard",
            ["kept runner torch,", "device: needs cuda, found cpu"],
            id="two go",
        ),
        pytest.param(
            {"a2a_backend": "none.standard", "runner_backend": "deep_gemm", "workloads": DECODE},
            SM90,
            "torch:none.standard + torch:torch.standard",
            ["kept a2a none.standard,", "format: needs masked tokens, found standard tokens"],
            id="the runner goes before the transport",
        ),
    ],
)
def test_a_fallback_drops_as_few_pins_as_will_do(
    fields: dict[str, Any], machine: Environment, expected: str, parts: list[str]
) -> None:
    decision = decide(request(allow_fallback=True, **fields), machine)
    assert chosen(decision) == [expected]
    text = decision.workloads[0].fallback
    assert text.startswith("fallback: asked for ")
    assert all(part in text for part in parts), text
    assert text in decision.explain()


def test_a_pin_that_can_run_needs_no_fallback() -> None:
    decision = decide(request(runner_backend="deep_gemm", allow_fallback=True), SM90)
    assert chosen(decision) == [CONTIGUOUS_BF16]
    assert not decision.workloads[0].fallback


def test_a_fallback_that_does_not_help_changes_nothing() -> None:
    layer = request(quant=W4A4_INT4, a2a_backend="ascend_fuseep")
    refused = decide(layer, CPU)
    tried = decide(attrs.evolve(layer, allow_fallback=True), CPU)
    assert not tried.is_feasible
    assert tried.workloads == refused.workloads


PHASED = plugin(
    dispatchers=[dispatcher()],
    runners=[
        runner("fast", archs=("sm90",), devices=("cuda",), tier="tuned", phases=("verify",)),
        runner("slow", devices=("cuda",)),
    ],
)


@pytest.mark.parametrize(
    ("fields", "expected", "fallback"),
    [
        ({}, "toy:toy.standard + toy:slow.standard", False),
        ({"runner_backend": "fast"}, None, False),
        ({"runner_backend": "fast", "allow_fallback": True}, "toy:toy.standard + toy:slow.standard", True),
    ],
)
def test_a_kernel_that_one_phase_lacks_on_this_generation(
    fields: dict[str, Any], expected: str | None, fallback: bool
) -> None:
    decision = decide(request(workloads=Workload(phase="verify"), **fields), SM100, PHASED)
    assert [str(reason) for reason in decision.reasons_of("toy:fast.standard")] == ["arch: needs sm90, found sm100"]
    assert bool(decision.workloads[0].fallback) is fallback
    if expected is None:
        assert not decision.is_feasible
    else:
        assert chosen(decision) == [expected]


@pytest.mark.parametrize("order", list(itertools.permutations(range(2))))
def test_layers_of_different_schemes_do_not_influence_each_other(order: tuple[int, ...]) -> None:
    layers = (request(quant=NVFP4, workloads=DECODE, a2a_backend="deepep"), request(workloads=DECODE))
    dtypes = {}
    for index in order:
        dtypes[index] = str(decide(layers[index], SM100).workloads[0].ranked[0].dtype.token_dtype)
    assert dtypes == {0: "bf16", 1: "bf16"}
    assert chosen(decide(layers[1], SM100)) == [MASKED_BF16]


@pytest.mark.error_path
def test_workloads_that_need_different_weight_layouts() -> None:
    workloads = (
        Workload(phase="decode", max_tokens=128, a2a_backend="deepep"),
        Workload(phase="prefill", a2a_backend="none.standard"),
    )
    decision = decide(request(quant=NVFP4, workloads=workloads), SM100)
    expect([reason.code for reason in decision.reasons] == ["weight-layout"], decision.reasons)
    expect("found decode: cutedsl-v1; prefill: cutedsl-v2" in decision.error, decision.error)
    expect(decision.error in decision.explain())


@pytest.mark.error_path
def test_schemes_are_said_by_name_and_only_the_nearest_of_many() -> None:
    named = (NVFP4, MXFP4, FP8_TENSOR, FP8_BLOCK128, W8A8_INT8)
    any_group = QuantScheme(weight_dtype="int4", weight_block=(1, 16), weight_scale="any", zero_point="any")
    w8a16 = attrs.evolve(W8A16_INT8, weight_scale="any")
    few = plugin(dispatchers=[dispatcher()], runners=[runner(schemes=(any_group, w8a16))])
    many = plugin(dispatchers=[dispatcher()], runners=[runner(schemes=(any_group, *named, w8a16))])
    (reason,) = decide(request(), CPU, few).reasons_of("toy:toy.standard")[-1:]
    assert reason.needs == f"w8a16_int8 or {any_group}"
    (reason,) = decide(request(quant=NVFP4_W4A16), CPU, many).reasons_of("toy:toy.standard")[-1:]
    # Nearest first, by the number of fields that differ: weights alone, and then the same weights.
    assert reason.needs.startswith("one of w8a16_int8, nvfp4, ")
    assert reason.needs.endswith(" and 2 more")
    assert "(" not in reason.needs


LAYOUTS = plugin(
    dispatchers=[dispatcher()],
    runners=[
        runner("first", weight_layout="one", tier="tuned", phases=("decode",)),
        runner("second", weight_layout="two"),
        runner("third", weight_layout="three", tier="reference"),
    ],
)


@pytest.mark.parametrize("workloads", [PREFILL_AND_DECODE, PREFILL_AND_DECODE[::-1]])
def test_workloads_share_the_layout_with_the_best_places(workloads: tuple[Workload, ...]) -> None:
    decision = decide(request(workloads=workloads), CPU, LAYOUTS)
    assert decision.weight_layout == "two"
    assert set(chosen(decision)) == {"toy:toy.standard + toy:second.standard"}
    (note,) = next(w for w in decision.workloads if w.workload.phase == "decode").notes
    assert note == (
        "weight-layout: two serves all workloads; not used: "
        "toy:toy.standard + toy:first.standard, first by rank, and 1 more"
    )
    decode = next(w for w in decision.workloads if w.workload.phase == "decode")
    assert [candidate.runner.spec.name for candidate in decode.unshared] == ["first", "third"]
    assert decode.ranked[0].because == "only candidate"
    assert why(decision, decode) == "weight-layout: two serves all workloads"
    written = next(w for w in decision.to_json()["workloads"] if w["workload"]["phase"] == "decode")
    assert written["outranked_by"] == "weight-layout: two"
    assert written["unshared"] == [candidate.full_name for candidate in decode.unshared]
    prefill = next(w for w in decision.workloads if w.workload.phase == "prefill")
    assert why(decision, prefill) == "first of 2 that fit: tier generic"
    assert "  fit, but lack what all workloads share: toy:toy.standard + toy:first" in decision.explain(full=True)


def test_one_workload_gives_nothing_up() -> None:
    decision = decide(request(workloads=Workload(phase="decode")), CPU, LAYOUTS)
    (decode,) = decision.workloads
    assert decode.notes == ()
    assert why(decision, decode) == "first of 3 that fit: tier tuned"
    text = decision.explain()
    assert "\n  and 2 more fit, but with other weight layouts than one, which the first has\n" in text
    assert "all workloads" not in text


def test_what_is_left_is_set_apart_from_what_is_left() -> None:
    left_out = [runner("x", weight_layout="three", phases=("decode",))]
    second = runner("z", weight_layout="two", tier="reference")
    plugins = attrs.evolve(LAYOUTS, runners=[*LAYOUTS.runners[:2], *left_out, second])
    decode = decide(request(workloads=PREFILL_AND_DECODE), CPU, plugins).workloads[-1]
    assert decode.workload.phase == "decode"
    assert [(entry.candidate.runner.spec.name, entry.because) for entry in decode.ranked] == [
        # Not "tie broken by name", which it was before `x`.
        ("second", "tier generic"),
        ("z", "tier reference"),
    ]


BEST_TOGETHER = plugin(
    dispatchers=[dispatcher()],
    runners=[
        runner("a_decode", weight_layout="a", tier="tuned", phases=("decode",)),
        runner("a_prefill", weight_layout="a", tier="reference", phases=("prefill",)),
        runner("b", weight_layout="b"),
        runner("c", weight_layout="c", phases=("prefill",)),
    ],
)


@pytest.mark.parametrize("workloads", [PREFILL_AND_DECODE, PREFILL_AND_DECODE[::-1]])
def test_no_workload_outweighs_the_others(workloads: tuple[Workload, ...]) -> None:
    assert decide(request(workloads=workloads), CPU, BEST_TOGETHER).weight_layout == "b"


def _deterministic(**phases: tuple[str, ...]) -> PluginSpec:
    runners = [runner(name, deterministic=True, phases=phases[name]) for name in phases]
    return plugin(dispatchers=[dispatcher(deterministic=True)], runners=runners)


def test_a_deterministic_layer_has_one_combination() -> None:
    both = _deterministic(a=("decode",), b=("prefill",), c=("decode", "prefill"))
    decision = decide(request(deterministic=True, workloads=PREFILL_AND_DECODE), CPU, both)
    assert set(chosen(decision)) == {"toy:toy.standard + toy:c.standard"}


@pytest.mark.error_path
def test_a_deterministic_layer_without_a_common_combination() -> None:
    apart = _deterministic(a=("decode",), b=("prefill",))
    decision = decide(request(deterministic=True, workloads=PREFILL_AND_DECODE), CPU, apart)
    expect([reason.code for reason in decision.reasons] == ["determinism"], decision.error)


# Order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefer", "expected", "because"),
    [
        ((), MASKED_BF16, "the host never waits for the device"),
        # A plugin's name means its runner first: its dispatcher `none` serves other plugins' runners, too.
        (("torch",), "torch:none.standard + torch:torch.standard", "no permutation on one rank"),
        (("torch.standard",), "torch:none.standard + torch:torch.standard", "prefer"),
        (("torch.masked", "deepep"), MASKED_TORCH, "prefer"),
        (("deepep", "torch.masked"), MASKED_TORCH, "prefer"),
        (("deepep.normal", "deep_gemm.contiguous_bf16"), CONTIGUOUS_BF16, "prefer"),
    ],
)
def test_prefer(prefer: tuple[str, ...], expected: str, because: str) -> None:
    decision = decide(request(prefer=prefer, workloads=DECODE, ep_size=1), SM90)
    first = decision.workloads[0].ranked[0]
    assert (first.candidate.full_name, first.because) == (expected, because)


_H100 = load_environment("h100")
_TORCH_ALONE = attrs.evolve(_H100, packages={"torch": "2.11.0"})
_PREFILL = (Workload(phase="prefill", max_tokens=4096),)
_CAPTURED = (Workload(phase="decode", graph_capture=True),)


@pytest.mark.parametrize(
    ("machine", "fields", "expected"),
    [
        (_H100, {}, "triton:triton.fused"),
        (_H100, {"ep_size": 2}, "torch:torch_alltoall.standard + triton:triton.standard"),
        (_H100, {"ep_size": 2, "workloads": DECODE}, "triton:peer_memory.standard + triton:triton.standard"),
        (_H100, {"ep_size": 2, "workloads": _PREFILL}, "triton:peer_memory.standard + triton:triton.standard"),
        (_H100, {"ep_size": 2, "token_placement": "replicated"}, "torch:none.standard + triton:triton.standard"),
        (_TORCH_ALONE, {}, "torch:none.standard + torch:torch.standard"),
        (_TORCH_ALONE, {"ep_size": 2}, "torch:torch_alltoall.standard + torch:torch.standard"),
        (_TORCH_ALONE, {"workloads": _CAPTURED}, "torch:none.standard + torch:torch.standard"),
        (load_environment("cpu"), {"ep_size": 2}, "torch:torch_alltoall.standard + torch:torch.standard"),
    ],
)
def test_what_the_shipped_plugins_run(machine: Environment, fields: dict[str, Any], expected: str) -> None:
    decision = decide(request(**fields), machine, shipped_torch(), shipped_triton())
    assert decision.workloads[0].ranked[0].candidate.full_name == expected


def test_one_rank_takes_tokens_as_they_come() -> None:
    ranked = decide(request(), CPU, TORCH).workloads[0].ranked
    assert [entry.candidate.runner.spec.format for entry in ranked] == ["standard", "contiguous", "masked"]
    assert [entry.because for entry in ranked][:2] == ["no permutation on one rank", "tie broken by name"]


_SENDERS = [
    dispatcher("a", "masked", format="masked", graph_safe=True),
    dispatcher("b", "contiguous", format="contiguous", graph_safe=True),
    dispatcher("c", "standard", format="standard", graph_safe=True),
    dispatcher("d", "waits", format="standard"),
]
_READERS = [runner(kernel=format_, format=format_, graph_safe=True) for format_ in ("masked", "contiguous", "standard")]
_NEVER_WAITS, _BY_NAME = "the host never waits for the device", "tie broken by name"


@pytest.mark.parametrize(
    ("phase", "ep_size", "order", "because"),
    [
        # What never makes the host wait comes first; of that, few tokens go where they are not permuted.
        ("decode", 2, "cabd", ["no permutation of few tokens", _BY_NAME, _NEVER_WAITS]),
        ("verify", 2, "cabd", ["no permutation of few tokens", _BY_NAME, _NEVER_WAITS]),
        ("prefill", 2, "abcd", [_BY_NAME, _BY_NAME, _NEVER_WAITS]),
        ("any", 2, "abcd", [_BY_NAME, _BY_NAME, _NEVER_WAITS]),
        # One rank has nothing to move, however many tokens.
        ("decode", 1, "cdab", [_NEVER_WAITS, "no permutation on one rank", _BY_NAME]),
    ],
)
def test_few_tokens_of_several_ranks_are_not_permuted(phase: str, ep_size: int, order: str, because: list[str]) -> None:
    senders = plugin(dispatchers=_SENDERS, runners=_READERS)
    layer = request(ep_size=ep_size, workloads=Workload(phase=phase, max_tokens=64))
    ranked = decide(layer, CPU, senders).workloads[0].ranked
    assert "".join(entry.candidate.a2a_backend for entry in ranked) == order
    assert [entry.because for entry in ranked[:-1]] == because


def test_what_permutes_few_tokens_comes_after_what_does_not() -> None:
    senders = plugin(dispatchers=_SENDERS[:3], runners=_READERS)
    ranked = decide(request(ep_size=2, workloads=DECODE), CPU, senders).workloads[0].ranked
    # The last is told apart from the one before it.
    assert [entry.because for entry in ranked] == ["no permutation of few tokens", _BY_NAME, _BY_NAME]
    ranked = decide(request(ep_size=2, workloads=DECODE, exclude=("a",)), CPU, senders).workloads[0].ranked
    assert ranked[1].because == "permutes few tokens"


_SM89 = attrs.evolve(_H100, arch="sm89", device_name="")


@pytest.mark.parametrize(
    ("machine", "fields", "expected", "because"),
    [
        (_SM89, {}, "triton:triton.fused_untuned", "one call for everything"),
        (_SM89, {"ep_size": 2}, "torch:torch_alltoall.standard + torch:torch.standard", _BY_NAME),
    ],
)
def test_where_nothing_was_measured_one_call_comes_before_two(
    machine: Environment, fields: dict[str, Any], expected: str, because: str
) -> None:
    first, second, *_ = decide(request(**fields), machine, shipped_torch(), shipped_triton()).workloads[0].ranked
    assert (first.candidate.full_name, first.because) == (expected, because)
    assert second.candidate.runner.spec.tier == first.candidate.runner.spec.tier


@pytest.mark.parametrize(
    ("ep_size", "expected"),
    [
        (1, "those in place 2, 3: moe-core tune on that machine would decide by times"),
        (2, "those in place 2, 3: pin or prefer the one you know"),
    ],
)
def test_a_tie_that_the_name_breaks_is_told(ep_size: int, expected: str) -> None:
    runners = [*(runner(name, tier="tuned") for name in "abc"), runner("d", tier="fused")]
    senders = plugin(dispatchers=[dispatcher()], runners=runners)
    layer = request(ep_size=ep_size)
    assert "tells it from" not in decide(layer, CPU, senders).explain()
    text = decide(attrs.evolve(layer, exclude=("d",)), CPU, senders).explain()
    assert f"tie broken by name; nothing that was declared or measured tells it from {expected}\n" in text


@pytest.mark.parametrize(("sends_early", "tells"), [(True, False), (False, True), (False, False), (True, True)])
def test_combine_begins_early_where_both_sides_can(sends_early: bool, tells: bool) -> None:
    parts = plugin(
        dispatchers=[dispatcher(format="masked", down_gemm_overlap=sends_early)],
        runners=[runner(format="masked", down_gemm_overlap=tells)],
    )
    decision = decide(request(workloads=Workload(down_gemm_overlap=True)), CPU, parts)
    assert decision.is_feasible == (sends_early and tells)
    without = [report.declared for report in decision.workloads[0].specs if report.reasons]
    assert len(without) == (not sends_early) + (not tells)
    assert decide(request(), CPU, parts).is_feasible


@pytest.mark.parametrize("name", ["cuda_deepgemm", "deep_gemm", "deepep.normal", "cuda_deepgemm:deep_gemm"])
def test_exclude(name: str) -> None:
    decision = decide(request(exclude=(name,)), SM90)
    excluded = [spec for spec in decision.workloads[0].specs if any(r.code == "excluded" for r in spec.reasons)]
    assert excluded
    assert all(name.partition(":")[2] in spec.declared.full_name for spec in excluded)


@pytest.mark.parametrize(
    ("fields", "hints"),
    [
        # Of 96 channels on four ranks each has 24; 96, 48 and 32 are whole tiles.
        ({"intermediate_size": 96, "tp_size": 4}, ["takes more; or tp_size 2, 3, 6 fit"]),
        ({"intermediate_size": 100, "tp_size": 4}, ["takes more"]),
        # No split over ranks changes that.
        ({"intermediate_size": 96, "hidden_size": 100}, ["takes more"]),
        ({"intermediate_size": 100, "hidden_size": 100}, ["takes more"] * 2),
    ],
)
def test_another_split_is_advised_where_it_helps(fields: dict[str, Any], hints: list[str]) -> None:
    tiles = [Limit(field, "multiple_of", 16, "takes more") for field in ("hidden_size", "intermediate_size")]
    tiled = plugin(dispatchers=[dispatcher()], runners=[runner("tiled", limits=tiles)])
    decision = decide(request(**fields), CPU, tiled)
    assert [reason.hint for reason in decision.reasons_of("toy:tiled.standard")] == hints


def test_what_is_excluded_twice_has_one_reason() -> None:
    decision = decide(request(exclude=("deep_gemm", "deep_gemm")), SM90)
    (spec, *_) = (spec for spec in decision.workloads[0].specs if any(r.code == "excluded" for r in spec.reasons))
    assert len([reason for reason in spec.reasons if reason.code == "excluded"]) == 1


def test_excluding_the_a2a_name_of_a_fused_runner() -> None:
    decision = decide(request(quant=W8A8_INT8, exclude=("ascend_fuseep",)), A3)
    assert chosen(decision) == ["ascend_npu:deepep.low_latency + ascend_npu:ascend.w8a8"]


TWINS = plugin(dispatchers=[dispatcher()], runners=[runner("a"), runner("b"), runner("z", tier="tuned")])
LAYER = request(workloads=Workload(max_tokens=64))


def _measured(name: str, tokens: int, microseconds: float) -> Measurement:
    full_name = f"toy:toy.standard + toy:{name}.standard"
    return Measurement(
        candidate=full_name,
        arch="cpu",
        shape=shape_key(LAYER),
        num_tokens=tokens,
        microseconds=microseconds,
        source="bench",
    )


@pytest.mark.parametrize(
    ("rows", "order", "because"),
    [
        pytest.param([], "zab", "tier tuned", id="nothing measured"),
        pytest.param([("z", 64, 9.0), ("b", 64, 5.0)], "bza", "measured 5 us (exact, T=64; bench)", id="exact"),
        pytest.param(
            [("z", 32, 9.0), ("z", 100, 9.0), ("b", 60, 5.0), ("b", 128, 4.0)],
            "bza",
            "measured 5 us (nearest, T=60 for 64; bench)",
            id="nearest",
        ),
        pytest.param([("b", 64, 5.0)], "zab", "tier tuned", id="the best by tier was not measured"),
        pytest.param([("z", 64, 9.0), ("b", 65, 5.0)], "zab", "measured 9 us (exact, T=64; bench)", id="outside"),
    ],
)
def test_measurements(rows: list[tuple[str, int, float]], order: str, because: str) -> None:
    for permuted in itertools.permutations(rows):
        table = MeasurementTable([_measured(*row) for row in permuted])
        ranked = resolve([TWINS], LAYER, CPU, table).workloads[-1].ranked
        assert "".join(entry.candidate.runner.spec.name for entry in ranked) == order
        assert ranked[0].because == because


def test_a_name_keeps_no_time_from_counting() -> None:
    without = attrs.evolve(LAYER, exclude=("z",))
    ranked = resolve([TWINS], without, CPU, MeasurementTable([_measured("b", 64, 5.0)])).workloads[0].ranked
    assert [(entry.candidate.runner.spec.name, entry.because) for entry in ranked] == [
        ("b", "measured 5 us (exact, T=64; bench)"),
        ("a", "not measured"),
    ]


def test_how_a_fused_runner_moves_tokens_is_preferred_like_a_dispatcher() -> None:
    fused = runner("one_call", "fused", format="fused", a2a="move", tier="fused")
    parts = plugin(dispatchers=[dispatcher("move")], runners=[fused, runner("a"), runner("z", tier="tuned")])
    layer, pair = attrs.evolve(LAYER, prefer=("move",)), "toy:move.standard + toy:z.standard"
    table = measured(layer, {"toy:one_call.fused": {64: 9.0}, pair: {64: 5.0}})
    ranked = resolve([parts], layer, CPU, table).workloads[0].ranked
    assert [entry.candidate.runner.spec.name for entry in ranked] == ["z", "one_call", "a"]
    assert {entry.preferred for entry in ranked} == {("move (its dispatcher)",)}
    (first, *_) = resolve([parts], attrs.evolve(LAYER, prefer=("one_call",)), CPU, table).workloads[0].ranked
    assert first.preferred == ("one_call",)


def test_a_preference_is_above_the_layout_that_other_phases_would_choose() -> None:
    layer = request(workloads=PREFILL_AND_DECODE, prefer=("a_decode",))
    assert decide(layer, CPU, BEST_TOGETHER).weight_layout == "a"


def test_prefer_is_above_measurements() -> None:
    table = MeasurementTable([_measured("z", 64, 9.0), _measured("a", 64, 1.0), _measured("b", 64, 5.0)])
    ranked = resolve([TWINS], attrs.evolve(LAYER, prefer=("b",)), CPU, table).workloads[0].ranked
    assert [entry.because for entry in ranked[:2]] == ["prefer", "measured 1 us (exact, T=64; bench)"]
    assert [entry.preferred for entry in ranked] == [("b",), (), ()]


def test_what_is_preferred_is_told_from_what_was_measured() -> None:
    # The fastest of all is not preferred: times rank those that the preference does not tell apart.
    one = plugin("one", dispatchers=[dispatcher("move")], runners=[runner("a"), runner("b")])
    two = plugin("two", runners=[runner("z", tier="tuned")])
    times = {
        "one:a": Time(5.0, (4.5, 9.0)),
        "one:b": Time(9.0, (8.0, 10.0)),
        "two:z": Time(1.0, (0.5, 8.5)),
    }
    table = measured(LAYER, {f"one:move.standard + {name}.standard": {64: time} for name, time in times.items()})
    decision = resolve([one, two], attrs.evolve(LAYER, prefer=("one",)), CPU, table)
    (workload,) = decision.workloads
    assert [(entry.candidate.runner.spec.name, entry.preferred) for entry in workload.ranked] == [
        ("a", ("one",)),
        ("b", ("one",)),
        ("z", ("one (its dispatcher)",)),
    ]
    assert why(decision, workload).startswith(
        "preferred: one, as are 2 of 3 that fit; first of these: measured 5 us (exact, T=64; bench); not told apart "
        "from that in place 2: "
    )
    assert decision.to_json()["workloads"][0]["ranked"][2]["preferred"] == ["one (its dispatcher)"]
    decision = resolve([one, two], attrs.evolve(LAYER, prefer=("two",)), CPU, table)
    assert why(decision, decision.workloads[0]) == "preferred: two, alone of 3 that fit"


# Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"a2a_backend": "depep"}, "unknown a2a backend 'depep'; did you mean 'deepep'"),
        ({"a2a_backend": "deepep.fast"}, "unknown a2a backend 'deepep.fast'; did you mean 'deepep'"),
        ({"a2a_backend": "deepep.nrmal"}, "did you mean 'deepep.normal'"),
        ({"a2a_backend": "cuda_deepgemm:deepep.nrmal"}, "did you mean 'cuda_deepgemm:deepep.normal'"),
        ({"runner_backend": "deep_gemm.contiguous_bf61"}, "did you mean 'deep_gemm.contiguous_bf16'"),
        ({"prefer": ("deepep.low_latncy",)}, "did you mean 'deepep.low_latency'"),
        ({"a2a_backend": "torch:deepep"}, "unknown a2a backend 'torch:deepep'"),
        ({"a2a_backend": "x", "runner_backend": "deep_gemm"}, r"'deep_gemm' can be joined to: deepep.low_latency"),
        ({"workloads": Workload(a2a_backend="depep")}, "unknown a2a backend 'depep'"),
        ({"runner_backend": "deepgem"}, "unknown runner backend 'deepgem'; did you mean 'deep_gemm'"),
        ({"prefer": ("torhc",)}, "unknown backend 'torhc'; did you mean 'torch'"),
        ({"exclude": ("cuda_deepgem",)}, "unknown backend 'cuda_deepgem'; did you mean 'cuda_deepgemm'"),
    ],
)
def test_a_name_that_means_nothing(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(UnknownNameError, match=match) as caught:
        decide(request(**fields), SM90)
    copied = pickle.loads(pickle.dumps(caught.value))
    expect(str(copied) == str(caught.value))


def test_without_plugins_nothing_fits() -> None:
    decision = resolve((), request(), CPU)
    assert not decision.is_feasible
    assert decision.error == "nothing fits workload any"


@pytest.mark.error_path
def test_two_declarations_of_one_name() -> None:
    with pytest.raises(PluginConflictError, match="two declarations are called 'toy'"):
        decide(request(), CPU, TWINS, LAYOUTS)


# Reasons --------------------------------------------------------------------------------------------------------

GOOD = request(workloads=Workload(phase="decode", max_tokens=64), ep_size=2, runner_backend="toy", a2a_backend="toy")
# One that was looked at may have any device of any generation.
GOOD_MACHINE = Environment(device_type="cuda", arch="sm90", packages={"lib": "1.5"}, source="probed")
STRICT = plugin(
    dispatchers=[
        dispatcher(sends=(BF16_TOKENS, FP8_ROW)),
        dispatcher("other", format="masked"),
        dispatcher("aligned", row_alignment=8),
        dispatcher("wire", sends=(FP8_ROW,)),
    ],
    runners=[
        runner(
            devices=("cuda",),
            archs=("sm90",),
            phases=("decode",),
            row_alignment=16,
            limits=(Limit("top_k", "<=", 8), Limit("hidden_size", "multiple_of", 128)),
            requirements=(
                Requirement(module="lib", minimum="1.2", install="pip install lib", programs=(Program(name="libcc"),)),
            ),
            settings=(Setting(values={"LIB_COUNTS": ("", "1")}, hint="unset it"),),
        ),
        runner("lonely"),
    ],
)
_DECODE_GRAPH = Workload(phase="decode", max_tokens=64, graph_capture=True)
_DECODE_OVERLAP = Workload(phase="decode", max_tokens=64, down_gemm_overlap=True)
_Change = Callable[[LayerRequest, Environment], tuple[LayerRequest, Environment]]


def _layer(**fields: Any) -> _Change:
    return lambda layer, machine: (attrs.evolve(layer, **fields), machine)


def _machine(**fields: Any) -> _Change:
    return lambda layer, machine: (layer, attrs.evolve(machine, **fields))


#: Code -> (what breaks the good layer that way, what its hint asks for).
FAULTS: dict[str, tuple[_Change, _Change]] = {
    "excluded": (_layer(exclude=("toy",)), _layer(exclude=())),
    "package": (_machine(packages={}), _machine(packages={"lib": "1.5"})),
    "version": (_machine(packages={"lib": "1.1"}), _machine(packages={"lib": "1.5"})),
    "program": (_machine(programs={"libcc": ""}), _machine(programs={"libcc": "/bin/libcc"})),
    "variable": (_machine(variables={"LIB_COUNTS": "0"}), _machine(variables={})),
    "device": (_machine(device_type="npu"), _machine(device_type="cuda")),
    "arch": (_machine(arch="sm80"), _machine(arch="sm90")),
    "scheme": (_layer(quant=FP8_BLOCK128), _layer(quant=BF16)),
    "activation": (_layer(activation=RELU2), _layer(activation=ActivationSpec())),
    "dtype": (_layer(dtype="fp16", quant=FP16), _layer(dtype="bf16", quant=BF16)),
    "bias": (_layer(bias=True), _layer(bias=False)),
    "weighting": (_layer(weight_on_input=True), _layer(weight_on_input=False)),
    "post-norm": (_layer(post_norm=True), _layer(post_norm=False)),
    "phase": (_layer(workloads=Workload(phase="prefill")), _layer(workloads=GOOD.workloads)),
    "limit": (_layer(top_k=9), _layer(top_k=8)),
    "tokens": (_layer(token_placement="replicated"), _layer(token_placement="distributed")),
    "graph": (_layer(workloads=_DECODE_GRAPH), _layer(workloads=GOOD.workloads)),
    "overlap": (_layer(workloads=_DECODE_OVERLAP), _layer(workloads=GOOD.workloads)),
    "determinism": (_layer(deterministic=True), _layer(deterministic=False)),
    "format": (_layer(a2a_backend="other"), _layer(a2a_backend="toy")),
    "dispatch-dtype": (_layer(dispatch_dtype="fp8"), _layer(dispatch_dtype=None)),
    "alignment": (_layer(a2a_backend="aligned"), _layer(a2a_backend="toy")),
}


def test_the_good_layer_is_good() -> None:
    assert chosen(resolve([STRICT], GOOD, GOOD_MACHINE)) == ["toy:toy.standard + toy:toy.standard"]


def _codes(layer: LayerRequest, machine: Environment) -> set[str]:
    """Codes of all reasons against what is pinned, as a reader of the decision sees them."""
    decision = resolve([STRICT], layer, machine)
    if decision.is_feasible:
        return set()
    (workload,) = decision.workloads
    alone = {reason.code for spec in workload.specs if ":toy." in spec.declared.full_name for reason in spec.reasons}
    return alone or {
        reason.code
        for pair in workload.pairs
        if pair.candidate.a2a_backend == layer.a2a_backend and pair.candidate.runner.spec.name == "toy"
        for reason in pair.reasons
    }


@pytest.mark.parametrize("code", FAULTS)
def test_every_reason_is_given(code: str) -> None:
    broken = FAULTS[code][0](GOOD, GOOD_MACHINE)
    assert code in _codes(*broken)


def test_every_code_is_reachable() -> None:
    # Pins, and the layouts of several workloads, have tests of their own.
    assert {*FAULTS, "pin", "weight-layout"} == set(REASON_CODES)


def test_pairs_that_were_not_pinned_say_so() -> None:
    decision = resolve([STRICT], attrs.evolve(GOOD, runner_backend="lonely"), GOOD_MACHINE)
    reasons = decision.reasons_of("toy:other.standard + toy:toy.standard")
    assert [str(reason) for reason in reasons if reason.code == "pin"] == [
        "pin: needs a2a backend toy, found other",
        "pin: needs runner backend lonely, found toy",
    ]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(sorted(FAULTS)), min_size=1, max_size=6))
def test_fixing_what_is_listed_ends_feasible(codes: set[str]) -> None:
    state = (GOOD, GOOD_MACHINE)
    for code in sorted(codes):
        state = FAULTS[code][0](*state)
    for _ in range(2 * len(FAULTS)):
        listed = _codes(*state)
        if not listed:
            break
        for code in sorted(listed):
            state = FAULTS[code][1](*state)
    assert resolve([STRICT], *state).is_feasible


def test_all_reasons_are_kept_not_the_first() -> None:
    broken = (GOOD, GOOD_MACHINE)
    for code in ("arch", "scheme", "activation", "bias", "limit", "package"):
        broken = FAULTS[code][0](*broken)
    assert _codes(*broken) == {"arch", "scheme", "activation", "bias", "limit", "package"}


def test_ids_count_only_where_several_ranks_share_the_experts() -> None:
    spec = plugin(dispatchers=[dispatcher(id_space="global")], runners=[runner()])
    decision = decide(request(ep_size=2), CPU, spec)
    reasons = decision.reasons_of("toy:toy.standard + toy:toy.standard")
    assert [str(reason) for reason in reasons] == ["format: needs local expert ids, found global expert ids"]
    assert decide(request(), CPU, spec).is_feasible


def test_router_weights_on_the_input_are_the_dispatchers_business_where_it_owns_them() -> None:
    layer = request(weight_on_input=True, a2a_backend="deepep.normal", runner_backend="torch")
    decision = decide(layer, SM90)
    (reason,) = decision.reasons_of("cuda_deepgemm:deepep.normal")
    assert reason.code == "weighting"


def test_unknown_token_counts_leave_limits_on_them_open() -> None:
    assert (
        decide(request(workloads=Workload(phase="decode")), SM90).reasons_of("cuda_deepgemm:deepep.low_latency") == ()
    )


# Nothing depends on order ---------------------------------------------------------------------------------------

REQUESTS = [
    request(workloads=PREFILL_AND_DECODE),
    request(quant=NVFP4, workloads=DECODE),
    request(quant=W8A8_INT8),
    request(dtype="fp16", prefer=("torch.masked",)),
]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), layer=st.sampled_from(REQUESTS), machine=st.sampled_from([SM90, SM100, A3, CPU]))
def test_the_order_of_plugins_and_specs_does_not_count(
    data: st.DataObject, layer: LayerRequest, machine: Environment
) -> None:
    shuffled = [
        attrs.evolve(
            declared,
            dispatchers=data.draw(st.permutations(declared.dispatchers)),
            runners=data.draw(st.permutations(declared.runners)),
        )
        for declared in data.draw(st.permutations(VENDORS))
    ]
    assert resolve(shuffled, layer, machine) == resolve(VENDORS, layer, machine)


def test_another_plugin_changes_nothing_but_its_own_rows() -> None:
    layer = request(quant=FP8_BLOCK128, workloads=DECODE)
    few, many = (resolve(plugins, layer, SM90) for plugins in ([TORCH, CUDA_DEEPGEMM], VENDORS))
    assert few.workloads[0].ranked[0] == many.workloads[0].ranked[0]
    assert few.workloads[0].ranked[0].dtype.token_dtype == FP8_COLUMN
