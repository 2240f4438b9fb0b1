"""Reasons in groups: each said once, by what would have to change, with nothing lost that decides."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from fakes import CPU, DECODE, PREFILL_AND_DECODE, SM90, chosen, decide, dispatcher, plugin, request, runner

from moe_core.environment import Environment
from moe_core.findings import Reason
from moe_core.misses import Miss, Misses, compact, relevant
from moe_core.request import Workload

WITHOUT_DEEP_GEMM = attrs.evolve(SM90, packages={"torch": "2.11.0", "deep_ep": "1.2.1"})


def _misses(machine: Environment = SM90, **fields: Any) -> Misses:
    decision = decide(request(**fields), machine)
    return Misses.of(decision.request, decision.workloads)


def _texts(misses: tuple[Miss, ...]) -> list[str]:
    return [text for miss in misses for text in miss.texts]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["deepep.normal", "deepep.low_latency", "deep_gemm.fp8"], "deepep.normal, .low_latency, deep_gemm.fp8"),
        (["triton", "triton.fused"], "triton, .fused"),
        (["none", "torch_alltoall"], "none, torch_alltoall"),
        ([], ""),
    ],
)
def test_a_family_is_named_where_it_begins(names: list[str], text: str) -> None:
    assert compact(names) == text


def test_other_devices_are_a_line_per_plugin() -> None:
    assert [miss.lines for miss in _misses().machine] == [
        ["ascend_npu: 7 variants need npu, found cuda"],
        ["flashinfer_cutedsl: 2 variants need sm100 or sm103, found sm90"],
    ]


def test_what_the_model_decides_is_apart_from_what_can_be_changed() -> None:
    misses = _misses(attrs.evolve(SM90, packages={"torch": "2.13.0", "deep_gemm": "2.5.0"}))
    assert _texts(misses.near) == [
        "cuda_deepgemm:deepep.low_latency, .normal: package: needs deep_ep >= 1.2, found not installed; "
        "pip install deep-ep",
        "cuda_deepgemm:deepep.low_latency: phase: needs decode or verify, found any",
    ]
    assert _texts(misses.model) == [
        "cuda_deepgemm:deep_gemm.contiguous_fp8, .masked_fp8: scheme: needs fp8_block128, found bf16"
    ]


def test_a_size_of_the_model_is_the_models() -> None:
    # top_k 12 against 11.
    misses = _misses(top_k=12, workloads=DECODE)
    (text,) = [text for text in _texts(misses.model) if "top_k" in text]
    assert text.startswith("cuda_deepgemm:deepep.low_latency: limit: needs top_k <= 11")
    assert not any("top_k" in text for text in _texts(misses.near))


def test_a_bound_that_the_workload_lacks_can_be_declared() -> None:
    bounded = plugin(dispatchers=[dispatcher(needs_max_tokens=True), dispatcher(mode="unbound")], runners=[runner()])
    prefill = Workload(phase="prefill")
    decision = decide(request(workloads=(prefill, *DECODE)), SM90, bounded)
    assert _texts(Misses.of(decision.request, decision.workloads).near) == [
        "prefill: toy:toy.standard: limit: needs max_tokens, found any number of tokens; "
        "declare Workload(max_tokens=...)"
    ]
    assert chosen(decision) == ["toy:toy.unbound + toy:toy.standard", "toy:toy.standard + toy:toy.standard"]


def test_a_missing_package_is_said_once_for_a_plugin() -> None:
    misses = _misses(WITHOUT_DEEP_GEMM, workloads=DECODE)
    lines = [line for miss in misses.nearest for line in miss.lines]
    assert sum("deep_gemm >= 2.4" in line for line in lines) == 1


def test_several_reasons_against_the_same_names_share_a_title() -> None:
    (miss,) = [miss for miss in _misses(workloads=PREFILL_AND_DECODE).near if "low_latency" in miss.title]
    title, *reasons = miss.lines
    assert title == "prefill: cuda_deepgemm:deepep.low_latency:"
    assert [reason.split(":")[0] for reason in reasons] == ["  phase", "  limit"]


def test_what_is_named_is_told_in_full_wherever_it_runs() -> None:
    (every, *_) = _misses(CPU, runner_backend="ascend").named
    # What no installation changes comes first.
    assert [reason.code for reason in every.reasons] == ["device", "arch", "package"]
    assert {reason.code for miss in _misses(prefer=("flashinfer_cutedsl",)).named for reason in miss.reasons} == {
        "arch",
        "scheme",
    }


def test_a_name_that_means_something_here_does_not_unfold_other_machines() -> None:
    misses = _misses(a2a_backend="deepep", workloads=DECODE, top_k=12)
    assert [miss.title for miss in misses.named] == ["cuda_deepgemm:deepep.low_latency"]
    assert misses.machine[0].title == "ascend_npu: 7 variants need npu, found cuda"


def test_a_pin_that_passes_here_folds_what_it_means_elsewhere() -> None:
    decision = decide(request(a2a_backend="deepep", dispatch_dtype="int8", workloads=DECODE, strict=True), SM90)
    (workload,) = decision.workloads
    shown = relevant(decision.request.pins(workload.workload), workload)
    misses = Misses.of(decision.request, [shown])
    assert [miss.title for miss in misses.machine] == ["ascend_npu: 2 variants need npu, found cuda"]
    assert not misses.named


def test_pairs_that_were_not_pinned_are_one_group() -> None:
    (miss,) = _misses(runner_backend="deep_gemm").pairs
    assert miss.lines == [f"{miss.names[0]} and 3 more pairs: pin: needs runner backend deep_gemm, found others"]
    assert len(miss.names) == 4


def test_where_nothing_speaks_one_format_that_is_the_reason() -> None:
    decision = decide(request(a2a_backend="none.standard", runner_backend="deep_gemm", workloads=DECODE), SM90)
    (workload,) = decision.workloads
    shown = relevant(decision.request.pins(workload.workload), workload)
    codes = {reason.code for miss in Misses.of(decision.request, [shown]).pairs for reason in miss.reasons}
    assert codes == {"format"}


@pytest.mark.parametrize("machine", [CPU, SM90], ids=["cpu", "sm90"])
def test_whatever_fails_is_in_one_group_with_a_reason_of_its_own(machine: Environment) -> None:
    decision = decide(request(workloads=PREFILL_AND_DECODE, bias=True), machine)
    misses = Misses.of(decision.request, decision.workloads)
    kinds = (misses.named, misses.near, misses.model, misses.machine)
    told = [{f"{miss.plugin}:{name}" for miss in kind for name in miss.names} for kind in kinds]
    failed = {spec.declared.full_name for w in decision.workloads for spec in w.specs if spec.reasons}
    assert set.union(*told) == failed
    assert sum(map(len, told)) == len(failed)
    for miss in (miss for kind in kinds for miss in kind):
        for name in miss.names:
            assert set(miss.reasons) <= set(decision.reasons_of(f"{miss.plugin}:{name}"))


def test_one_variant_is_called_by_name() -> None:
    miss = Miss(plugin="toy", names=("toy.a",), reasons=(Reason("arch", "sm100", "sm90"),), is_folded=True)
    assert miss.title == "toy:toy.a needs sm100, found sm90"
