"""What the table of `moe-core tune` says of how sure its figures are, and of what plans take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import attrs
import pytest
from fakes import CPU, dispatcher, plugin, request, runner
from measured import measured

from moe_core.cli import tune_view
from moe_core.cli.tune_view import TuneView
from moe_core.resolver import resolve
from moe_core.tuning.search import Step
from moe_core.tuning.timing import Timing

#: Samples of combinations, by tokens; quartiles of the first are 2 % of the median apart.
Samples = Mapping[int, Mapping[str, Sequence[float]]]
SHARP, WIDE = (99, 99, 100, 101, 101), (60, 90, 100, 110, 150)
LAYER = request()
SPEC = plugin(
    dispatchers=[dispatcher()],
    runners=[runner("few", tier="tuned"), runner("many"), runner("other", weight_layout="own")],
)


def _full(name: str) -> str:
    return f"toy:toy.standard + toy:{name}.standard"


def _times(samples: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(factor * sample for sample in samples)


def _show(view: TuneView, steps: Sequence[Step]) -> None:
    """Each step with what follows from it and those before it."""
    times: dict[str, dict[int, object]] = {}
    for step in steps:
        for name, time in step.times.items():
            times.setdefault(name, {})[step.num_tokens] = time
        view.add(step, resolve([SPEC], LAYER, CPU, measured(LAYER, times)))


def _printed(
    capsys: pytest.CaptureFixture[str],
    samples: Samples,
    names: Sequence[str] = ("few", "many"),
    keeps_weights: bool = False,
) -> tuple[str, str]:
    """Results and progress of one layer."""
    with TuneView(CPU, 1, list(samples), 0.0, math.inf) as view:
        view.begin("a layer", keeps_weights)
        view.candidates([_full(name) for name in names])
        timings = {
            count: {_full(name): Timing(tuple(taken), "wall") for name, taken in of_count.items()}
            for count, of_count in samples.items()
        }
        _show(view, [Step(num_tokens=count, timings=timed, problems={}) for count, timed in timings.items()])
        view.finish()
    out, err = capsys.readouterr()
    return out, err


def _note(out: str, label: str) -> str:
    """What stands behind a label below the table, up to the next one, in one line."""
    lines = itertools.dropwhile(lambda line: not line.startswith(f"{label} "), out.splitlines())
    first = next(lines, label).removeprefix(label)
    return " ".join(" ".join([first, *itertools.takewhile(lambda line: line.startswith(" "), lines)]).split())


def _rows(out: str) -> list[list[str]]:
    lines = out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.split()[:1] == ["T"])
    return [line.split() for line in lines[first : first + 3]]


def test_spread_and_what_is_not_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    samples = {
        1: {"few": _times(SHARP, 1), "many": _times(SHARP, 2)},
        2: {"few": _times(SHARP, 1), "many": _times(WIDE, 1.05)},
    }
    out, err = _printed(capsys, samples)
    assert _rows(out) == [
        ["T", "1", "2", "SPREAD", "FASTEST", "PLAN"],
        ["1", "100", "200", "2%", "1", "1"],
        ["2", "100", "105", "2%", "1,", "2", "1"],
    ]
    assert not _note(out, "changes")
    assert f"T=1: {_full('few')}, 100 us (spread 2%), is the fastest of 2\n" in err
    assert "(spread 2%), is the fastest of 2, not told apart from 1 of them\n" in err
    for header in ("SPREAD", "FASTEST", "PLAN"):
        assert _note(out, header)


def test_one_sample_has_no_spread(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = _printed(capsys, {1: {"few": (5.0,), "many": (9.0,)}, 2: {"few": (9.0,), "many": (5.0,)}})
    assert [row[-3:] for row in _rows(out)[1:]] == [["-", "1", "1"], ["-", "2", "2"]]


@pytest.mark.parametrize(
    ("counts", "change", "help_"),
    [
        # Neighbours by a factor of two: nothing to add.
        ((1, 2), "1 to 2 from T=2 on", ""),
        ((1, 64), "1 to 2 from T=8 on, the middle by ratio of 1 and 64: nothing between was measured", "--tokens 8"),
    ],
)
def test_how_sure_a_change_is(
    capsys: pytest.CaptureFixture[str], counts: tuple[int, int], change: str, help_: str
) -> None:
    first, last = counts
    samples = {
        first: {"few": _times(SHARP, 1), "many": _times(SHARP, 2)},
        last: {"few": _times(SHARP, 1.08), "many": _times(SHARP, 1)},
    }
    out, _ = _printed(capsys, samples)
    assert (_note(out, "changes"), _note(out, "to be surer")) == (change, help_)


def test_the_fastest_that_samples_do_not_tell_is_no_change(capsys: pytest.CaptureFixture[str]) -> None:
    samples = {
        1: {"few": _times(SHARP, 1), "many": _times(SHARP, 2)},
        2: {"few": _times(WIDE, 1.08), "many": _times(SHARP, 1)},
    }
    out, _ = _printed(capsys, samples)
    assert [row[-3:] for row in _rows(out)[1:]] == [["2%", "1", "1"], ["2,", "1", "1"]]
    assert not _note(out, "changes")
    assert _note(out, "to be surer") == "more --repeats, or a quieter machine, where several are the fastest"


def test_the_fastest_with_weights_in_another_layout_is_named_with_what_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    samples = {
        1: {"few": _times(SHARP, 1), "many": _times(SHARP, 2), "other": _times(SHARP, 0.8)},
        2: {"few": _times(SHARP, 1), "many": _times(SHARP, 2), "other": _times(SHARP, 3)},
        4: {"few": _times(SHARP, 1), "many": _times(SHARP, 2), "other": _times(SHARP, 0.5)},
    }
    out, _ = _printed(capsys, samples, ("few", "many", "other"))
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["1"], ["2"], ["4"])][:3]
    assert [row[-2:] for row in rows] == [["3", "1"], ["1", "1"], ["3", "1"]]
    assert _note(out, "left out") == (
        "3 is faster by 25% at T=1, 100% at T=4, and plans do not use it: it needs weight layout own, all routes of a "
        "plan share one, and canonical costs less over all token counts; who prefers toy:other.standard gets it for "
        "all of them"
    )
    out, _ = _printed(capsys, samples, ("few", "many", "other"), keeps_weights=True)
    assert _note(out, "left out") == (
        "3 is faster by 25% at T=1, 100% at T=4, and plans do not use it: it needs weight layout own, which would be a "
        "copy beside the weights that the model keeps; who pins toy:other.standard gets it, and a layer of its own "
        "(--shape) does by its times"
    )


def test_a_count_at_which_nothing_runs_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    with TuneView(CPU, 1, [1, 2, 4], 0.0, math.inf) as view:
        view.begin("a layer", False)
        view.candidates([_full("few"), _full("many")])
        fast = {1: {"few": 1.0, "many": 2.0}, 2: {}, 4: {"few": 2.0, "many": 1.0}}
        steps = [
            Step(
                num_tokens=count,
                timings={_full(name): Timing((time,), "wall") for name, time in times.items()},
                problems={},
            )
            for count, times in fast.items()
        ]
        _show(view, steps)
        view.finish()
    out, err = capsys.readouterr()
    assert "T=2: nothing runs" in err
    assert _note(out, "changes").startswith("1 to 2 from T=2 on, the middle by ratio of 1 and 4")


def test_what_a_problem_means_for_plans(capsys: pytest.CaptureFixture[str]) -> None:
    names = [_full("few"), _full("many"), _full("other")]
    with TuneView(CPU, 1, [1], 0.0, math.inf) as view:
        view.begin("a layer", False)
        view.candidates(names)
        problems = dict(zip(names, ("wrong", "wrong", "slow"), strict=True))
        _show(view, [Step(num_tokens=1, timings={}, problems=problems, wrong=frozenset(names[:2]))])
        view.finish()
    # Where lines break depends on the terminal.
    assert " ".join(capsys.readouterr().out.split()).endswith(
        "1 wrong; none of its times is kept; plans choose it by its tier all the same, unless they exclude it "
        "2 wrong; none of its times is kept "
        "3 slow"
    )


def test_threads_of_a_cpu_are_said_beforehand(capsys: pytest.CaptureFixture[str]) -> None:
    for threads, told in ((2, True), (0, False)):
        with TuneView(attrs.evolve(CPU, threads=threads), 1, [1], 0.0, math.inf):
            pass
        assert ("programs that compute with 2 threads, as this one" in capsys.readouterr().err) is told


def test_what_is_done_is_told_where_nothing_else_was_for_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(tune_view.time, "monotonic", lambda: now[0])
    with TuneView(CPU, 1, [1], 0.0, 90.0) as view:
        view.begin("a layer", False)
        view.tell("drawing weights")
        now[0] += 3
        view.tell("preparing weights for few")
        now[0] += 1
        view.tell("T=1: few")
    assert capsys.readouterr().err.splitlines()[-2:] == ["a layer", "  preparing weights for few ..."]
