from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from fakes import CPU, PREFILL_AND_DECODE, dispatcher, manager_of, plugin, request, runner
from hypothesis import given
from hypothesis import strategies as st
from measured import measured

from moe_core.decision import Decision
from moe_core.measurements import MeasurementTable, Time
from moe_core.planner import make_plan
from moe_core.request import LayerRequest, Workload
from moe_core.resolver import resolve
from moe_core.specs import Limit, PluginSpec
from moe_core.tuning.timing import Timing

# 64 experts, top-8: the experts are saturated from 1024 tokens on.
LAYER = request()
SPEC = plugin(
    dispatchers=[dispatcher(token_placements=("distributed", "replicated"), deterministic=True)],
    runners=[
        runner("few", tier="tuned", deterministic=True),
        runner("many", deterministic=True),
        runner("short", limits=(Limit("max_tokens", "<=", 100),)),
        runner("alone", weight_layout="other"),
    ],
)
Times = Mapping[str, Mapping[int, float | Time]]
CROSSING: Times = {"few": {1: 10, 16: 20, 256: 300, 2048: 2000}, "many": {1: 30, 16: 35, 256: 200, 2048: 1000}}


def _table(times: Times, layer: LayerRequest = LAYER) -> MeasurementTable:
    return measured(layer, {f"toy:toy.standard + toy:{name}.standard": of_name for name, of_name in times.items()})


def _decide(times: Times, layer: LayerRequest = LAYER, spec: PluginSpec = SPEC) -> Decision:
    return resolve([spec], layer, CPU, _table(times, layer))


def _ranges(decision: Decision) -> list[tuple[int, int | None, str]]:
    return [(w.min_tokens, w.workload.max_tokens, w.ranked[0].candidate.runner.spec.name) for w in decision.workloads]


def _any(max_tokens: int | None = None) -> dict[str, Any]:
    return {"workloads": Workload(max_tokens=max_tokens)}


@pytest.mark.parametrize(
    ("fields", "ranges"),
    [
        # 64 * 64 == 16 * 256: there both are equally near, and the larger count speaks.
        ({}, [(1, 63, "few"), (64, None, "many")]),
        (_any(8192), [(1, 63, "few"), (64, 8192, "many")]),
        (_any(64), [(1, 63, "few"), (64, 64, "many")]),
        (_any(63), [(1, 63, "few")]),
        ({"deterministic": True}, [(1, None, "few")]),
        ({"deterministic": True, **_any(256)}, [(1, 256, "many")]),
        ({"ep_size": 2}, [(1, None, "few")]),
        ({"ep_size": 2, **_any(256)}, [(1, 256, "many")]),
        ({"ep_size": 2, "token_placement": "replicated"}, [(1, 63, "few"), (64, None, "many")]),
        ({"runner_backend": "few"}, [(1, None, "few")]),
        ({"exclude": ("few", "alone")}, [(1, None, "many")]),
        # Of what only its name sets behind another one, times count.
        ({"exclude": ("few",)}, [(1, None, "many")]),
        ({"prefer": ("few",)}, [(1, None, "few")]),
        ({"prefer": ("alone",)}, [(1, None, "alone")]),
    ],
)
def test_ranges(fields: dict[str, Any], ranges: list[tuple[int, int | None, str]]) -> None:
    layer = request(**fields)
    assert _ranges(_decide(CROSSING, layer)) == ranges


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = _table({"few": {1: 1, 64: 9}, "many": {1: 2, 64: 5}}).rows
    for permuted in itertools.permutations(rows):
        found = _ranges(resolve([SPEC], LAYER, CPU, MeasurementTable(permuted)))
        assert found == [(1, 7, "few"), (8, 64, "many"), (65, None, "few")]


@pytest.mark.parametrize(
    ("times", "ranges"),
    [
        pytest.param({"few": {1: 10}, "many": {1: 9.8}}, "few", id="what stands first by tier must be beaten clearly"),
        pytest.param({"few": {1: 10}, "many": {1: 9.7}}, "many few", id="clearly"),
        pytest.param({"few": {1: 10, 2048: 10}, "many": {1: 9, 2048: 10.2}}, "many", id="going back must pay as well"),
        pytest.param({"few": {1: 10, 2048: 10}, "many": {1: 9, 2048: 10.4}}, "many few", id="it does"),
        pytest.param({"many": {1: 5, 2048: 5}}, "few", id="the best by tier was not measured"),
        pytest.param({"few": {1: 9, 16: 9}, "many": {1: 5}}, "many few", id="not measured at all counts"),
        pytest.param({"few": {1: 9, 2048: 9}, "many": {1: 20, 600: 5}}, "few", id="a time of far fewer tokens"),
        pytest.param({"few": {1: 9, 2048: 9}, "short": {1: 5, 2048: 5}}, "short few", id="a declared limit"),
    ],
)
def test_a_range_must_pay(times: Times, ranges: str) -> None:
    assert " ".join(name for *_, name in _ranges(_decide(times))) == ranges


def test_counts_that_nothing_speaks_for_go_by_tier() -> None:
    times = {"few": {4: 10, 16: 10}, "many": {4: 5, 16: 5}}
    assert _ranges(_decide(times)) == [(1, 16, "many"), (17, None, "few")]
    assert _ranges(_decide(times, request(**_any(10)))) == [(1, 10, "many")]
    # Below the smallest measured count a workload's own largest count was not measured.
    assert _ranges(_decide(times, request(**_any(3)))) == [(1, 3, "few")]


def test_the_winner_stands_first_and_says_why() -> None:
    first, second = _decide(CROSSING).workloads
    assert first.ranked[0].because == "measured 20 us (exact, T=16; bench)"
    assert first.notes[1:] == ()
    assert second.ranked[0].because == "measured 1000 us (exact, T=2048; bench)"
    assert second.notes[-1] == (
        "from 64 tokens toy:toy.standard + toy:many.standard: 50% faster than toy:toy.standard + toy:few.standard"
    )
    close = _decide({"few": {1: 10.0}, "many": {1: 9.8}}).workloads[0].ranked
    assert [entry.candidate.runner.spec.name for entry in close[:2]] == ["few", "many"]
    assert close[0].because == "measured 10 us (exact, T=1; bench), less than 3% from the fastest"


def test_what_is_kept_among_the_preferred_says_so() -> None:
    runners = [runner("own", "x", tier="tuned"), runner("own", "y"), runner("other", tier="tuned")]
    spec, layer = plugin(dispatchers=[dispatcher()], runners=runners), request(prefer=("own",))
    times = {"own.x": {1: 10.0}, "own.y": {1: 9.8}, "other.standard": {1: 5.0}}
    table = measured(layer, {f"toy:toy.standard + toy:{name}": of_name for name, of_name in times.items()})
    first, second, third = resolve([spec], layer, CPU, table).workloads[0].ranked
    assert [entry.candidate.runner.spec.short_name for entry in (first, second, third)] == [
        "own.x",
        "own.y",
        "other.standard",
    ]
    # By its time it had the second place, which preference set apart from the third.
    assert first.because == "measured 10 us (exact, T=1; bench), less than 3% from the fastest"


@pytest.mark.parametrize("is_sure", [True, False])
def test_a_range_needs_samples_that_tell_it(is_sure: bool) -> None:
    few = {1: Time(10.0, (9.0, 11.0)), 2: Time(12.0, (11.0, 13.0))}
    many = {1: Time(11.0, (10.0, 12.0)), 2: Time(10.0, (9.0, 10.9 if is_sure else 11.0))}
    _, decision = make_plan(manager_of(SPEC), request(**_any(2)), CPU, _table({"few": few, "many": many}))
    assert _ranges(decision) == ([(1, 1, "few"), (2, 2, "many")] if is_sure else [(1, 2, "few")])
    last = decision.workloads[-1]
    assert [entry.candidate.runner.spec.name for entry in last.not_told_apart] == ["many"] * (not is_sure)
    assert ("not told apart from that in place 2" in decision.explain()) is True
    if not is_sure:
        assert last.ranked[0].because == "measured 12 us (exact, T=2; bench), not told apart from the fastest"


def test_what_pays_for_sure_is_taken_where_the_fastest_is_in_doubt() -> None:
    wide, sharp = Time(10.0, (5.0, 25.0)), Time(11.0, (10.9, 11.1))
    decision = _decide({"few": {1: Time(20.0, (19.0, 21.0))}, "many": {1: wide}, "short": {1: sharp}})
    first = decision.workloads[0]
    assert [entry.candidate.runner.spec.name for entry in first.ranked[:3]] == ["short", "many", "few"]
    assert first.ranked[0].because.endswith(", not told apart from the fastest")
    assert [entry.candidate.runner.spec.name for entry in first.not_told_apart] == ["many"]


@pytest.mark.parametrize("alone", [Time(9.0, (8.0, 10.5)), Time(9.86, (9.86, 9.86)), 9.8])
def test_noise_chooses_no_weight_layout(alone: float | Time) -> None:
    times = {"few": {1: Time(10.0, (9.9, 10.1)), 2: Time(10.0, (9.9, 10.1))}, "alone": {1: alone, 2: alone}}
    assert _decide(times).weight_layout == "canonical"
    better = {count: Time(9.0, (8.9, 9.1)) for count in (1, 2)}
    assert _decide(times | {"alone": better}).weight_layout == "other"


@pytest.mark.parametrize(("counts", "layout"), [(1, "canonical"), (2, "other")])
def test_small_gains_choose_a_weight_layout_together(counts: int, layout: str) -> None:
    # Two percent each; what samples do not tell apart adds nothing.
    few = {count: Time(10.0, (9.9, 10.1)) for count in (1, 2, 4)}
    alone = {count: Time(9.8, (9.7, 9.85)) for count in (1, 2)[:counts]} | {4: Time(9.5, (9.0, 10.0))}
    assert _decide({"few": few, "alone": {2: Time(10.0, (9.9, 10.1))} | alone}).weight_layout == layout


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ({"few": {1: 10.0, 2: 10.0}, "alone": {1: 10.0, 2: 9.0}}, "other is 11% faster than canonical over 2 "),
        (
            {"few": {1: Time(10.0, (9.9, 10.1))}, "alone": {1: Time(9.8, (9.7, 9.8))}},
            "canonical is kept: other is 2.0% ",
        ),
        ({"few": {1: 10.0, 2: 10.0}, "alone": {1: 9.0, 2: 90.0}}, "canonical serves all workloads"),
    ],
)
def test_what_speaks_for_a_layout_is_told(times: Times, told: str) -> None:
    decision = _decide(times)
    notes = {note for workload in decision.workloads for note in workload.notes}
    assert [note for note in notes if note.startswith(f"weight-layout: {told}")], notes


def test_equal_things_on_a_noisy_machine_have_one_route() -> None:
    drawn = random.Random(0)
    for _ in range(20):
        times = {
            name: {1 << power: _noisy_time(drawn) for power in range(12)} for name in ("few", "many", "short", "alone")
        }
        assert _ranges(_decide(times)) == [(1, None, "few")], times


def _noisy_time(drawn: random.Random) -> Time:
    """What is kept of samples that spread by tens of percent, and some by more."""
    timing = Timing(tuple(100 * drawn.lognormvariate(0, 0.2) for _ in range(15)), "wall")
    return Time(timing.microseconds, timing.bounds)


def test_samples_of_one_alone_tell_nothing() -> None:
    decision = _decide({"few": {1: Time(10.0, (1.0, 100.0))}, "many": {1: 11.0}})
    assert decision.workloads[0].not_told_apart == ()


@pytest.mark.parametrize(("last", "is_far"), [(16, False), (17, True), (2048, True)])
def test_a_range_that_begins_between_distant_counts_says_so(last: int, is_far: bool) -> None:
    decision = _decide({"few": {1: 10, 8: 10, last: 30}, "many": {1: 20, 8: 20, last: 20}})
    first, second, *_ = decision.workloads
    begins = math.isqrt(8 * last - 1) + 1
    told = f"{begins} tokens are the middle by ratio of T=8 and {last}; none between was measured"
    assert (second.min_tokens, told in second.notes) == (begins, is_far)
    assert not any("middle" in note for note in first.notes)


def test_a_range_that_was_asked_for_begins_where_it_was_asked_to() -> None:
    layer = request(workloads=(Workload(max_tokens=100), Workload()))
    decision = _decide({"few": {1: 10, 2048: 30}, "many": {1: 20, 2048: 20}}, layer)
    middles = [any("the middle" in note for note in workload.notes) for workload in decision.workloads]
    assert (_ranges(decision), middles) == (
        [(1, 45, "few"), (46, 100, "many"), (101, None, "many")],
        [False, True, False],
    )


def test_ranges_share_the_reports() -> None:
    decision = _decide(CROSSING)
    assert [is_new for _, is_new in decision.sections()] == [True, False]
    text = decision.explain(full=True)
    assert text.count("each spec alone") == 1
    assert "workload any, up to 63 tokens: order of those that fit" in text
    apart = "set apart from the next by, the last from the one before"
    assert f"workload any, from 64 tokens: order of those that fit [{apart}]" in text
    assert [w["min_tokens"] for w in decision.to_json()["workloads"]] == [1, 64]


def test_all_ranges_share_the_layout_that_costs_least() -> None:
    # `alone` wins at three of four counts, by less than it loses at one.
    times = {"few": {1: 10, 2: 10, 4: 10, 2048: 10}, "alone": {1: 9, 2: 9, 4: 9, 2048: 90}}
    decision = _decide(times)
    assert decision.weight_layout == "canonical"
    assert _ranges(decision) == [(1, None, "few")]
    better_times = times | {"alone": {1: 9, 2: 9, 4: 9, 2048: 11}}
    assert _decide(better_times).weight_layout == "other"
    # What is preferred is above times, and what is preferred alike is ranked by them.
    assert _decide(times, request(prefer=("alone",))).weight_layout == "other"
    assert _decide(times, request(prefer=("toy",))).weight_layout == "canonical"
    assert _decide(better_times, request(prefer=("toy",))).weight_layout == "other"


def test_phases_have_ranges_each() -> None:
    layer = request(workloads=PREFILL_AND_DECODE)
    decision = _decide(CROSSING, layer)
    assert _ranges(decision) == [(1, 63, "few"), (64, 4096, "many"), (1, 63, "few"), (64, 128, "many")]
    made, _ = make_plan(manager_of(SPEC), layer, CPU, _table(CROSSING))
    taken = {
        (phase, count): (route.phase, route.max_tokens)
        for phase, count in itertools.product(("prefill", "decode", None), (1, 63, 64, 128, 129))
        for route in [made.routes[made.route_index(count, phase)]]
    }
    assert [taken["prefill", count] for count in (1, 63, 64, 129)] == [
        *[("prefill", 63)] * 2,
        *[("prefill", 4096)] * 2,
    ]
    assert [taken["decode", count] for count in (1, 63, 64, 128, 129)] == [
        *[("decode", 63)] * 2,
        *[("decode", 128)] * 3,
    ]
    assert [taken[None, count] for count in (1, 64, 128, 129)] == [
        ("decode", 63),
        *[("decode", 128)] * 2,
        ("prefill", 4096),
    ]


def test_workloads_of_one_phase_are_ranges_that_the_user_made() -> None:
    workloads = (Workload(), Workload(max_tokens=32, a2a_backend="toy.standard"))
    spec = attrs.evolve(SPEC, dispatchers=[dispatcher(), dispatcher(mode="few")])
    made, decision = make_plan(manager_of(spec), request(workloads=workloads), CPU, MeasurementTable())
    assert [(w.min_tokens, w.workload.max_tokens) for w in decision.workloads] == [(33, None), (1, 32)]
    modes = [made.routes[made.route_index(count)].dispatcher.spec.mode for count in (1, 32, 33)]  # type: ignore[union-attr]
    assert modes == ["standard", "standard", "few"]


def test_measured_ranges_lie_inside_the_users() -> None:
    layer = request(workloads=(Workload(max_tokens=32), Workload()))
    assert _ranges(_decide(CROSSING, layer)) == [(1, 32, "few"), (33, 63, "few"), (64, None, "many")]


_TIME = st.floats(1, 1000)
_COUNTS = st.dictionaries(st.integers(1, 5000), _TIME, min_size=1, max_size=6)


@given(st.fixed_dictionaries({"few": _COUNTS, "many": _COUNTS}), st.none() | st.integers(1, 6000), st.integers(1, 6000))
def test_every_token_count_has_one_route(times: Times, limit: int | None, count: int) -> None:
    made, decision = make_plan(manager_of(SPEC), request(**_any(limit)), CPU, _table(times))
    ranges = _ranges(decision)
    assert ranges[0][0] == 1
    assert ranges[-1][1] == limit
    for (_, last, name), (first, _, following) in itertools.pairwise(ranges):
        assert first == (last or 0) + 1
        assert name != following
    if limit is None or count <= limit:
        taken = made.routes[made.route_index(count)].runner.spec.name
        (expected,) = (name for first, last, name in ranges if first <= count and (last is None or count <= last))
        assert taken == expected


LIMITED = plugin(
    dispatchers=[dispatcher()],
    runners=[
        runner(name, tier=tier, limits=(Limit("max_tokens", "<=", most),))
        for name, tier, most in (("few", "tuned", 40), ("many", "generic", 100))
    ],
)


@given(st.fixed_dictionaries({"few": _COUNTS, "many": _COUNTS}))
def test_no_range_exceeds_what_its_backends_take(times: Times) -> None:
    # Times of more tokens than a backend takes: of an earlier version of it, or written by hand.
    made, _ = make_plan(manager_of(LIMITED), LAYER, CPU, _table(times))
    for route in made.routes:
        assert route.max_tokens is not None
        assert route.max_tokens <= (route.candidate.declared_max_tokens or 0)


def test_counts_past_a_limit_go_to_what_takes_them() -> None:
    decision = _decide({"few": {1: 5, 32: 5, 2000: 1}, "many": {1: 9, 32: 9, 80: 9}}, spec=LIMITED)
    assert _ranges(decision) == [(1, 5, "few"), (6, 399, "many")]


@pytest.mark.parametrize("slow", [1.7e308, Time(1.7e308, (1.7e308, 1.7e308))])
def test_times_whose_quotient_no_float_holds_choose_a_layout(slow: float | Time) -> None:
    decision = _decide({"few": {1: slow, 2: slow}, "alone": {1: 5e-324, 2: 5e-324}})
    assert decision.weight_layout == "other"
    decision = _decide({"few": {1: 5e-324, 2: 5e-324}, "alone": {1: slow, 2: slow}})
    assert decision.weight_layout == "canonical"
