"""The search over combinations, on runners that move the test's clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import CPU, W8A8_INT8, bare_plugin, dispatcher, expect, fake_plugin, runner
from triton_layers import both_manager

from moe_core.activation import ActivationSpec
from moe_core.errors import MoeCoreError, ResolutionError, SpecError
from moe_core.manager import BackendManager
from moe_core.payloads import PreparedTensor, PreparedWeights
from moe_core.probing import probe_environment
from moe_core.request import LayerRequest, Workload
from moe_core.specs import Limit
from moe_core.tuning import timing
from moe_core.tuning.deadline import Deadline, TimeUpError
from moe_core.tuning.search import DeviceLostError, LayerSearch

LAYER = LayerRequest(
    num_experts=4, top_k=2, hidden_size=16, intermediate_size=8, workloads=Workload(max_tokens=7, graph_capture=True)
)
#: Runner -> microseconds of a forward of T tokens.
TIMES = {
    "quick": lambda count: 10 + count,
    "steady": lambda count: 20,
    "slow": lambda count: 1000,
    "short": lambda count: 5,
    "broken": lambda count: 1 / (count < 16) and 40,
    "unbound": lambda count: 0,
}
#: Runner -> what it makes of the right answer.
RESULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


def _same(answer: torch.Tensor) -> torch.Tensor:
    return answer


def _answer(weights: PreparedWeights, hidden: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    w13, w2 = (weights[name][ids].float() for name in ("w13", "w2"))
    gate, up = torch.einsum("tkih,th->tki", w13, hidden.float()).chunk(2, dim=-1)
    rows = torch.einsum("tkhi,tki->tkh", w2, torch.nn.functional.silu(gate) * up)
    return (rows * scores[:, :, None]).sum(dim=1).to(hidden.dtype)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []

    def __call__(self) -> float:
        return self.now


def _prepare(plan: Any, weights: Any, out: Any) -> PreparedWeights:
    tensors = {name: PreparedTensor(data=tensor, owned=False) for name, tensor in weights.tensors.items()}
    return PreparedWeights(layout=plan.weight_layout, tensors=tensors)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setitem(timing.CLOCKS, "wall", moved)
    return moved


@pytest.fixture
def manager(clock: Clock) -> BackendManager:
    def bind(plan: Any, route: Any, weights: Any) -> Any:
        name = route.runner.spec.name
        if name == "unbound":
            raise RuntimeError("no kernel image\nand more")

        def experts(hidden_states: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            count = len(hidden_states)
            clock.calls.append((name, count))
            clock.now += TIMES[name](count) * 1e-6
            return RESULTS.get(name, _same)(_answer(weights, hidden_states, ids, scores))

        return experts

    def fused(name: str, **fields: Any) -> Any:
        layout = "own" if name == "steady" else "canonical"
        return runner(name, "fused", format="fused", a2a="none", weight_layout=layout, **fields)

    limits = {"short": (Limit("max_tokens", "<=", 4),)}
    runners = [fused(name, limits=limits.get(name, ())) for name in TIMES]
    made = BackendManager()
    hooks = {"fused_experts": bind, "process_weights_after_loading": _prepare}
    made.register("toy", fake_plugin("toy", [dispatcher()], runners, hooks))
    return made


def _full(*names: str) -> set[str]:
    return {f"toy:{name}.fused" for name in names}


def test_every_combination_is_measured_at_every_count(manager: BackendManager) -> None:
    search = LayerSearch(manager, LAYER, CPU)
    assert {candidate.full_name for candidate in search.candidates} == _full(*TIMES)
    few, many = search.steps([32, 1])
    assert (few.num_tokens, many.num_tokens) == (1, 32)
    assert few.microseconds == pytest.approx(
        {"toy:quick.fused": 11, "toy:steady.fused": 20, "toy:slow.fused": 1000, "toy:short.fused": 5}
        | {"toy:broken.fused": 40}
    )
    # `short` takes no more than four tokens, which is no problem to speak of.
    assert many.microseconds == pytest.approx({"toy:quick.fused": 42, "toy:steady.fused": 20})
    assert set(many.problems) == _full("slow", "broken", "unbound")


def test_what_fails_is_reported_and_left_out(manager: BackendManager, clock: Clock) -> None:
    search = LayerSearch(manager, LAYER, CPU)
    (first, second, third) = search.steps([1, 16, 32])
    assert first.problems["toy:unbound.fused"].endswith("RuntimeError: no kernel image")
    assert "toy:broken.fused" not in first.problems
    assert second.problems["toy:broken.fused"] == "T=16: ZeroDivisionError: division by zero"
    assert third.problems["toy:broken.fused"] == second.problems["toy:broken.fused"]
    assert ("broken", 32) not in clock.calls


@pytest.mark.parametrize("good_calls", [0, 6])
def test_what_exits_or_fails_in_a_turn_is_left_out_as_any_other(
    manager: BackendManager, clock: Clock, monkeypatch: pytest.MonkeyPatch, good_calls: int
) -> None:
    calls = itertools.count()

    def answer(right: torch.Tensor) -> torch.Tensor:
        if next(calls) >= good_calls:
            raise SystemExit(3)
        return right

    monkeypatch.setitem(RESULTS, "quick", answer)
    (step,) = LayerSearch(manager, LAYER, CPU).steps([1])
    assert step.problems["toy:quick.fused"] == "T=1: in the forward of toy:quick.fused: SystemExit: 3"
    assert "toy:quick.fused" not in step.microseconds
    assert len(step.microseconds) > 1


@pytest.mark.parametrize("factor", [0.9, torch.nan])
def test_a_wrong_result_has_no_time_and_is_nobodys_measure(
    manager: BackendManager, clock: Clock, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    # So fast that all others would be hopeless beside it.
    monkeypatch.setitem(TIMES, "quick", lambda count: 1)
    monkeypatch.setitem(RESULTS, "quick", lambda answer: answer * (factor if len(answer) > 1 else 1))
    first, second, third = LayerSearch(manager, LAYER, CPU).steps([1, 4, 8])
    assert "toy:quick.fused" in first.microseconds
    assert first.wrong == frozenset()
    assert second.wrong == third.wrong == _full("quick")
    assert second.problems["toy:quick.fused"].startswith("T=4: wrong result: ")
    assert "toy:quick.fused" not in {**second.microseconds, **third.microseconds}
    assert ("quick", 8) not in clock.calls


def test_what_is_hopeless_is_left_out(manager: BackendManager, clock: Clock) -> None:
    search = LayerSearch(manager, LAYER, CPU)
    first, second = search.steps([1, 8], repeats=5)
    assert first.problems["toy:slow.fused"] == "200 times slower than the fastest at T=1"
    assert "toy:slow.fused" not in second.microseconds
    assert ("slow", 8) not in clock.calls
    assert "toy:broken.fused" in second.microseconds
    sets = clock.calls.count(("quick", 1)) - 3
    # Beside two calls to warm up and one to compare: the two first samples, and for those not hopeless the five.
    assert sets * 2 == 7 * (clock.calls.count(("slow", 1)) - 3)


def test_what_the_tiers_would_choose_is_measured_to_the_end(
    manager: BackendManager, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Equal tiers go by name, and `broken` is the first.
    monkeypatch.setitem(TIMES, "broken", lambda count: 10_000)
    first, second = LayerSearch(manager, LAYER, CPU).steps([1, 8])
    assert first.microseconds["toy:broken.fused"] == pytest.approx(10_000)
    assert second.microseconds["toy:broken.fused"] == pytest.approx(10_000)
    assert "toy:broken.fused" not in second.problems


def test_what_is_done_next_is_told_before_it_is_done(manager: BackendManager, clock: Clock) -> None:
    told: list[tuple[str, int]] = []
    search = LayerSearch(manager, LAYER, CPU, told=lambda what: told.append((what, len(clock.calls))))
    list(search.steps([1, 2]))
    words = [what for what, _ in told]
    # After the part of each of four experts in w13, which is twice as large, and in w2.
    assert [what.rpartition(" ")[2] for what in words[:8]] == ["17%", "33%", "50%", "67%", "75%", "83%", "92%", "100%"]
    prepared = [what for what in words if what.startswith("preparing weights for ")]
    assert {what.removeprefix("preparing weights for ") for what in prepared} == _full(*TIMES)
    assert words.index("T=1: inputs and their answer") == words.index(prepared[-1]) + 1
    before = dict(told)
    first = next(place for place, (name, count) in enumerate(clock.calls) if (name, count) == ("steady", 2))
    assert before["T=2: toy:steady.fused"] == first
    assert "T=2: samples of 4 combinations in turns" in words


@pytest.mark.parametrize(
    ("microseconds", "seconds", "message"),
    [
        # Each of the five takes two calls to warm up, two samples of 16 calls, and one to compare.
        (1.0, 0.0, "time is up before drawing the weights"),
        (10e6, 15.0, "time is up before T=1"),
        (1e6, 20.0, "T=1 would take about 32 s more, 18 s are left"),
        (1e6, 40.0, "T=1 would take about 32 s more, 3 s are left"),
        # Five samples of each.
        (1e6, 200.0, "T=1 would take about 400 s more, 25 s are left"),
    ],
)
def test_a_count_that_does_not_fit_into_the_time_is_left_out(
    manager: BackendManager,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    microseconds: float,
    seconds: float,
    message: str,
) -> None:
    for name in TIMES:
        monkeypatch.setitem(TIMES, name, lambda count: microseconds)
    search = LayerSearch(manager, LAYER, CPU, deadline=Deadline(seconds, clock))
    with pytest.raises(TimeUpError, match=f"^{message}$"):
        next(search.steps([1]))
    assert search.problems.keys() <= _full("unbound")


def test_samples_end_with_the_time(manager: BackendManager, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    original = timing.take_turns

    def turns(prepared: Any, repeats: int, seconds: float, failed: Any) -> Any:
        taken.append(seconds)
        return original(prepared, repeats, seconds, failed)

    monkeypatch.setattr("moe_core.tuning.search.take_turns", turns)
    list(LayerSearch(manager, LAYER, CPU, deadline=Deadline(7.0, lambda: 0.0)).steps([1], seconds=9.0))
    list(LayerSearch(manager, LAYER, CPU).steps([1], seconds=9.0))
    assert taken == [7.0, 9.0]


@pytest.mark.error_path
def test_weights_that_cannot_be_drawn_are_drawn_once(manager: BackendManager, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = itertools.count()

    def draw(*arguments: Any, **others: Any) -> Any:
        next(draws)
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr("moe_core.tuning.search.random_weights", draw)
    with pytest.raises(MoeCoreError, match=r"^its weights cannot be drawn: out of memory$"):
        next(LayerSearch(manager, LAYER, CPU).steps([1]))
    expect(next(draws) == 1)


@pytest.mark.error_path
def test_a_device_that_does_not_answer_ends_the_search(
    manager: BackendManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    search = LayerSearch(manager, LAYER, CPU)
    steps = search.steps([16])
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(LayerSearch, "_is_cuda", True)
    with pytest.raises(DeviceLostError, match="no kernel image; the device does not answer since"):
        next(steps)


def test_the_weights_of_a_layout_are_prepared_once(manager: BackendManager, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[str] = []
    original = BackendManager.process_weights

    def counted(self: BackendManager, plan: Any, weights: Any, out: Any) -> PreparedWeights:
        layouts.append(plan.weight_layout)
        return original(self, plan, weights, out)

    monkeypatch.setattr(BackendManager, "process_weights", counted)
    list(LayerSearch(manager, LAYER, CPU).steps([1]))
    assert sorted(layouts) == ["canonical", "own"]


def test_measured_times_and_policies_do_not_choose_what_is_measured(manager: BackendManager) -> None:
    manager.register("policy", bare_plugin("policy", {"select_dispatcher": lambda candidates: candidates[-1]}))
    (step,) = LayerSearch(manager, LAYER, CPU).steps([1])
    assert set(step.microseconds) == _full("quick", "steady", "slow", "short", "broken")


@pytest.mark.error_path
def test_what_cannot_be_searched(manager: BackendManager) -> None:
    module = ActivationSpec(kind="module")
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 16, "intermediate_size": 8}
    with pytest.raises(SpecError, match="cannot be measured on random weights"):
        LayerSearch(manager, LayerRequest(**sizes, activation=module), CPU)
    message = r"no backend combination fits this layer: .*; moe-core resolve --explain"
    with pytest.raises(ResolutionError, match=message):
        LayerSearch(manager, LayerRequest(**sizes, quant=W8A8_INT8), CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu() -> None:
    layer = LayerRequest(num_experts=8, top_k=2, hidden_size=128, intermediate_size=64)
    plugins = both_manager()
    found = LayerSearch(plugins, layer, probe_environment(plugins.modules_required()))
    first, second = found.steps([1, 33], repeats=3, seconds=0.1)
    # One that is captured, and one that waits for the host and is timed by the clock.
    assert {"triton:triton.fused", "torch:none.standard + torch:torch.standard"} <= set(first.microseconds)
    assert "triton:triton.fused" in second.microseconds
    assert all("times slower" in problem for problem in second.problems.values()), second.problems
