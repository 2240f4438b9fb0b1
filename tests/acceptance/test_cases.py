"""The acceptance cases, one test each: on this library, and on the float64 oracle to show that they can pass."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import cases_choice
import cases_inputs
import cases_numbers
import cases_open
import cases_ranks
import cases_routing
import cases_state
import pytest
import reference_moe
import torch
from case_lib import ALL, T_, Lib, NotOffered, RefLib, expect, fp8_ckpt, plain

#: Importing a module of cases fills `case_lib.ALL`.
MODULES = (cases_open, cases_routing, cases_numbers, cases_inputs, cases_state, cases_ranks, cases_choice)
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in ALL}


def _case_ids(*numbers: int | range) -> frozenset[str]:
    each: Iterable[int] = (n for number in numbers for n in ([number] if isinstance(number, int) else number))
    return frozenset(f"MC-{n:02d}" for n in each)


#: These need a GPU.
NOT_ON_A_CPU = _case_ids(39)
#: What this library offers: these cases pass.
MUST_PASS = frozenset(CASES) - NOT_ON_A_CPU
#: Cases on the memory, the compilation, the modes and the large offsets of a real library: the oracle has none of it.
NOT_FOR_THE_ORACLE = _case_ids(39, 48, 49, 158)


def run_case(case: dict[str, Any], library: Lib) -> tuple[str, list[str]]:
    """Run one case; returns `passed`, `failed` or `skipped` (not offered) and a line for every comparison."""
    case["figures"].clear()
    case["refused"] = 0
    comparisons = T_(case, library)
    try:
        case["run"](library, comparisons)
    except NotOffered:
        return "skipped", comparisons.lines
    except Exception as error:
        error.add_note("\n".join([f"in {case['id']}, after:", *comparisons.lines]))
        raise
    return "failed" if comparisons.bad else "passed", comparisons.lines


def require(case: dict[str, Any], library: Lib, *, offered: bool) -> None:
    """Fail the test unless the case passes, or is skipped and not `offered`.

    What is offered must be right: a refusal is no pass even where the case would also take an error.
    """
    status, lines = run_case(case, library)
    title = f"{case['id']} [{case['kind']}] {case['title']}"
    if status == "skipped" and not offered:
        pytest.skip(f"{title}: not offered yet")
    if offered and case["refused"]:
        status = "refused where a right answer is due"
    if status != "passed":
        shown = lines or ["answered 'not offered'"]
        pytest.fail("\n    ".join([f"{title}: {status}", f"expected: {case['expect']}", *shown]), pytrace=False)


@pytest.fixture(scope="module")
def moe_core_library() -> Lib:
    """The adapter that stands beside this file."""
    if importlib.util.find_spec("adapter") is None:
        pytest.skip("no adapter.py beside the cases")
    library: Lib = importlib.import_module("adapter").MoECore()
    return library


@pytest.mark.parametrize("case_id", CASES)
def test_case(case_id: str, moe_core_library: Lib) -> None:
    require(CASES[case_id], moe_core_library, offered=case_id in MUST_PASS)


#: An id out of range stops a GPU's stream for good; nothing there is declared to repeat bit by bit.
NOT_ON_CUDA = _case_ids(14, 50)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("case_id", sorted(set(CASES) - NOT_ON_CUDA))
def test_case_on_cuda(case_id: str) -> None:
    require(CASES[case_id], importlib.import_module("adapter").MoECoreOnCuda(), offered=True)


# ---- the cases themselves --------------------------------------------------------------------------------------
def test_every_case_that_is_named_exists_once() -> None:
    assert set(CASES) >= NOT_ON_A_CPU | NOT_FOR_THE_ORACLE
    assert len(CASES) == len(ALL)
    assert {case["run"].__module__ for case in ALL} == {module.__name__ for module in MODULES}


@pytest.mark.parametrize("case_id", [case_id for case_id in CASES if case_id not in NOT_FOR_THE_ORACLE])
def test_case_on_the_oracle(case_id: str) -> None:
    require(CASES[case_id], RefLib(), offered=True)


def test_the_oracle_checks_itself(capsys: pytest.CaptureFixture[str]) -> None:
    status = reference_moe.self_check()
    assert status == 0, capsys.readouterr().out


class _SwapsHalves(RefLib):
    """Reads the gate rows of w13 as up rows."""

    def run(self, **spec: Any) -> torch.Tensor:
        swapped = {"gate_up": "up_gate", "up_gate": "gate_up", "interleaved": "gate_up"}
        return super().run(**{**spec, "ckpt": {**spec["ckpt"], "layout": swapped[spec["ckpt"]["layout"]]}})


class _DropsTheLastSlot(RefLib):
    """Forgets the last expert of every token."""

    def run(self, **spec: Any) -> torch.Tensor:
        return super().run(**{**spec, "ids": spec["ids"][:, :-1], "wts": spec["wts"][:, :-1]})


class _WeighsWithTheBias(RefLib):
    """Takes the weights from the scores after the correction bias was added."""

    def route(self, logits: torch.Tensor, k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        topk_ids, topk_weights = super().route(logits, k, **options)
        bias = options.get("bias")
        return topk_ids, topk_weights if bias is None else topk_weights + bias[topk_ids]


class _ReducesTwice(RefLib):
    """Sums over the ranks what combine has summed already."""

    def run_ranks(self, per_rank: list[dict[str, Any]], ep: int, **spec: Any) -> list[torch.Tensor]:
        return [ep * part for part in super().run_ranks(per_rank, ep, **spec)]


class _RefusesLargeTopK(RefLib):
    """Has a limit that a right answer is due beyond."""

    def run(self, **spec: Any) -> torch.Tensor:
        if spec["ids"].shape[1] > 8:
            raise ValueError("top_k is limited to 8")
        return super().run(**spec)


class _SwallowsErrors(RefLib):
    """Computes something for ids that no expert has."""

    def run(self, **spec: Any) -> torch.Tensor:
        return super().run(**{**spec, "ids": spec["ids"].clamp(max=spec["num_experts"] - 1)})


@pytest.mark.parametrize(
    ("wrong_library", "failing"),
    [
        (_SwapsHalves, _case_ids(1, 12, 13, 50)),
        (_DropsTheLastSlot, _case_ids(1, 7, 13, 15)),
        (_WeighsWithTheBias, _case_ids(5)),
        (_ReducesTwice, _case_ids(2, 53)),
        (_SwallowsErrors, _case_ids(14)),
    ],
)
def test_a_wrong_library_fails(wrong_library: Callable[[], Lib], failing: frozenset[str]) -> None:
    statuses = {case_id: run_case(CASES[case_id], wrong_library())[0] for case_id in sorted(failing)}
    assert statuses == dict.fromkeys(sorted(failing), "failed")


def test_a_failed_case_shows_its_comparisons() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"MC-53 .*\n.*expected:.*\n.*FAIL both ranks: .*rel err 1 "):
        require(CASES["MC-53"], _ReducesTwice(), offered=True)


def test_a_refusal_is_no_pass_where_a_right_answer_is_due() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"MC-07 .*refused where.*\n(.*\n)*.*limited to 8"):
        require(CASES["MC-07"], _RefusesLargeTopK(), offered=True)
    require(CASES["MC-07"], _RefusesLargeTopK(), offered=False)


def test_an_exception_keeps_the_comparisons_before_it() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_case({**CASES["MC-01"], "run": lambda library, comparisons: comparisons.same("first", 1 / 0)}, RefLib())
    assert caught.value.__notes__ == ["in MC-01, after:"]


def test_not_offered_is_a_skip_only_where_it_is_not_due() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"MC-53 .*not offered yet"):
        require(CASES["MC-53"], Lib(), offered=False)
    with pytest.raises(pytest.fail.Exception, match=r"MC-53 .*skipped"):
        require(CASES["MC-53"], Lib(), offered=True)


@pytest.mark.parametrize("inner", [128, 192])
@pytest.mark.parametrize("tp", [1, 2])
def test_fp8_tiles_follow_the_up_rows_that_come_first(inner: int, tp: int) -> None:
    spec = plain(T=4, H=128, I=inner, E=2, seed=31)
    up_gate = spec["ckpt"]["w13"].roll(inner, 1)
    up_gate[:, : inner // 2] *= 8
    # At 192 rows of a half, a tile over both of them.
    stored = {**fp8_ckpt(up_gate, spec["ckpt"]["w2"]), "layout": "up_gate"}
    spec = {**spec, "ckpt": stored}
    # As the cases have it for blocks of fp8.
    assert reference_moe.rel(importlib.import_module("adapter").MoECore().run(**spec, tp=tp), expect(spec)) < 5e-2
