from __future__ import annotations

import json
import pickle

import pytest
from fakes import A3, CPU, PREFILL_AND_DECODE, SM90, VENDORS, decide, expect, plugin, request, runner

from moe_core.errors import SpecError
from moe_core.findings import PluginReport, Reason
from moe_core.quant import W8A8_INT8
from moe_core.request import Workload
from moe_core.resolver import resolve


@pytest.mark.error_path
def test_a_reason_has_a_known_code() -> None:
    with pytest.raises(SpecError, match="Reason, field 'code': 'because' is not one of excluded, pin"):
        Reason("because", "a", "b")


@pytest.mark.parametrize(
    ("hint", "text"), [("", "arch: needs sm100, found sm90"), ("wait", "arch: needs sm100, found sm90; wait")]
)
def test_a_reason_as_text(hint: str, text: str) -> None:
    assert str(Reason("arch", "sm100", "sm90", hint)) == text


FEASIBLE = decide(request(workloads=PREFILL_AND_DECODE), SM90)
INFEASIBLE = decide(request(runner_backend="deep_gemm"), CPU)
APART = decide(
    request(
        quant=W8A8_INT8,
        workloads=(
            Workload(phase="decode", a2a_backend="ascend_fuseep"),
            Workload(phase="prefill", a2a_backend="deepep"),
        ),
    ),
    A3,
)


@pytest.mark.parametrize("decision", [FEASIBLE, INFEASIBLE, APART], ids=["feasible", "infeasible", "apart"])
def test_for_programs(decision) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(json.dumps(decision.to_json()))
    assert data["schema"] == 1
    assert data["feasible"] is decision.is_feasible
    assert len(data["workloads"][0]["specs"]) == sum(len(p.dispatchers) + len(p.runners) for p in VENDORS)
    names = [entry["name"] for entry in data["workloads"][0]["ranked"]]
    assert names == [entry.candidate.full_name for entry in decision.workloads[0].ranked]
    assert [reason["code"] for reason in data["reasons"]] == [reason.code for reason in decision.reasons]
    assert pickle.loads(pickle.dumps(decision)) == decision


def test_reports_that_differ_in_their_reasons_alone_are_told_apart() -> None:
    absent = plugin(runners=[runner("one", devices=("npu",), phases=("prefill",)), runner("two", devices=("npu",))])
    prefill, decode = decide(request(workloads=PREFILL_AND_DECODE), CPU, absent).workloads
    assert all(report.is_refused for report in (*prefill.specs, *decode.specs))
    (one, two), (other, same) = prefill.specs, decode.specs
    assert one != other
    assert {two} == {same}
    assert len({one, other, two, same}) == 3


def test_for_people() -> None:
    lines = FEASIBLE.explain().splitlines()
    assert lines[0] == "environment: cuda sm90 (by hand)"
    assert lines[1] == (
        "workload prefill, up to 4096 tokens: cuda_deepgemm:deepep.normal + cuda_deepgemm:deep_gemm.contiguous_bf16, "
        "bf16 by runner; first of 7 that fit: tie broken by name; nothing that was declared or measured tells it from "
        "those in place 2, 3: moe-core tune on that machine would decide by times"
    )
    assert "  ascend_npu: 7 variants need npu, found cuda" in lines
    assert lines[-2:] == ["every reason: explain(full=True)", "weight layout: canonical"]
    assert any(line.startswith("  1. ") and "[" in line for line in lines)


def test_in_full() -> None:
    lines = FEASIBLE.explain(full=True).splitlines()
    assert "workload prefill: each spec alone" in lines
    assert "workload decode: pairs of those that passed" in lines
    assert "    device: needs npu, found cuda" in lines
    assert lines[-1] == "weight layout: canonical"


@pytest.mark.error_path
def test_the_error_comes_last() -> None:
    expect(INFEASIBLE.explain().splitlines()[-1] == "error: nothing fits workload any")
    expect(APART.explain().splitlines()[-1].startswith("error: weight-layout: needs one weight layout"))


def test_every_reason_of_every_spec_is_in_the_text() -> None:
    text = INFEASIBLE.explain(full=True)
    reasons = [reason for spec in INFEASIBLE.workloads[0].specs for reason in spec.reasons]
    assert len(reasons) > 20
    assert all(str(reason) in text for reason in reasons)


def test_failed_plugins_are_part_of_the_decision() -> None:
    reports = (PluginReport(name="x", status="failed", error="ImportError: no"), PluginReport(name="y", status="ready"))
    text = resolve(VENDORS, request(), SM90, reports=reports).explain()
    assert "plugin x: failed: ImportError: no" in text
    assert "plugin y" not in text


def test_reasons_of_a_name_come_once() -> None:
    reasons = FEASIBLE.reasons_of("ascend_npu:ascend.bf16")
    assert [reason.code for reason in reasons] == ["package", "device", "arch"]


@pytest.mark.parametrize("pin", [None, "torch.masked"])
def test_pairs_of_different_formats_are_counted_and_not_listed(pin: str | None) -> None:
    (workload,) = decide(request(runner_backend=pin), CPU).workloads
    assert [pair.candidate.runner.spec.format for pair in workload.joined] == ["contiguous", "masked", "standard"]
    assert workload.num_unjoined == 6
