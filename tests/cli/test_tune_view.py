"""What the table of `moe-core tune` says of how sure its figures are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from moe_core.cli.tune_view import TuneView
from moe_core.environment import Environment
from moe_core.tuning.search import Step
from moe_core.tuning.timing import Timing

#: Samples of two combinations, by tokens; quartiles of the first are 2 % of the median apart.
Samples = Mapping[int, tuple[Sequence[float], Sequence[float]]]
SHARP, WIDE = (99, 99, 100, 101, 101), (60, 90, 100, 110, 150)


def _times(samples: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(factor * sample for sample in samples)


def _printed(capsys: pytest.CaptureFixture[str], samples: Samples) -> tuple[str, str]:
    """Results and progress of one layer; lines are joined."""
    machine = Environment(device_type="cpu")
    with TuneView(machine, 1, list(samples), 0.0, None) as view:
        view.begin("a layer")
        view.candidates(["few", "many"])
        for count, (few, many) in samples.items():
            timings = {"few": Timing(tuple(few), "wall"), "many": Timing(tuple(many), "wall")}
            view.add(Step(num_tokens=count, timings=timings, problems={}))
        view.finish()
    out, err = capsys.readouterr()
    return out, err


def _rows(out: str) -> list[list[str]]:
    lines = out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.split()[:1] == ["T"])
    return [line.split() for line in lines[first : first + 3]]


def test_spread_and_what_is_not_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = _printed(capsys, {1: (_times(SHARP, 1), _times(SHARP, 2)), 2: (_times(SHARP, 1), _times(WIDE, 1.05))})
    assert _rows(out) == [
        ["T", "1", "2", "SPREAD", "FASTEST"],
        ["1", "100", "200", "2%", "1"],
        ["2", "100", "105", "2%", "1,", "2"],
    ]
    assert "changes" not in out
    assert "T=1: few, 100 us (spread 2%), is the fastest of 2\n" in err
    assert "T=2: few, 100 us (spread 2%), is the fastest of 2, not told apart from 1 of them\n" in err
    for header in ("SPREAD", "FASTEST"):
        assert any(line.startswith(f"{header} ") for line in out.splitlines())


def test_one_sample_has_no_spread(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = _printed(capsys, {1: ((5.0,), (9.0,)), 2: ((9.0,), (5.0,))})
    assert [row[-2:] for row in _rows(out)[1:]] == [["-", "1"], ["-", "2"]]


@pytest.mark.parametrize(
    ("counts", "slower", "said"),
    [
        # Neighbours by a factor of two, and samples that are apart: nothing to add.
        ((1, 2), SHARP, "1 to 2 between T=1 and 2"),
        (
            (1, 64),
            SHARP,
            "1 to 2 between T=1 and 64; nothing was measured there, plans take the middle by ratio, T=8 "
            "to be surer: --tokens 8",
        ),
        (
            (1, 2),
            WIDE,
            "1 to 2 between T=1 and 2; not told apart at T=2 to be surer: more --repeats, a quieter machine",
        ),
        (
            (3, 100),
            WIDE,
            "1 to 2 between T=3 and 100; nothing was measured there, plans take the middle by ratio, T=18; not told "
            "apart at T=100 to be surer: --tokens 18, more --repeats, a quieter machine",
        ),
    ],
)
def test_how_sure_a_change_of_the_fastest_is(
    capsys: pytest.CaptureFixture[str], counts: tuple[int, int], slower: Sequence[float], said: str
) -> None:
    first, last = counts
    out, _ = _printed(
        capsys, {first: (_times(SHARP, 1), _times(SHARP, 2)), last: (_times(slower, 1.08), _times(SHARP, 1))}
    )
    text = " ".join(out.split())
    assert text.partition("changes ")[2].partition(" SPREAD of")[0] == said


def test_a_count_at_which_nothing_runs_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    with TuneView(Environment(device_type="cpu"), 1, [1, 2, 4], 0.0, None) as view:
        view.begin("a layer")
        view.candidates(["few", "many"])
        for count, fast in ((1, "few"), (2, ""), (4, "many")):
            timings = {
                name: Timing((1.0 if name == fast else 2.0,), "wall") for name in (("few", "many") if fast else ())
            }
            view.add(Step(num_tokens=count, timings=timings, problems={}))
        view.finish()
    out, err = capsys.readouterr()
    assert "T=2: nothing runs" in err
    assert "1 to 2 between T=1 and 4; nothing was measured there" in out


def test_what_a_problem_means_for_plans(capsys: pytest.CaptureFixture[str]) -> None:
    with TuneView(Environment(device_type="cpu"), 1, [1], 0.0, None) as view:
        view.begin("a layer")
        view.candidates(["first", "second", "third"])
        problems = {"first": "wrong", "second": "wrong", "third": "slow"}
        view.add(Step(num_tokens=1, timings={}, problems=problems, wrong=frozenset({"first", "second"})))
        view.finish()
    # Where lines break depends on the terminal.
    assert " ".join(capsys.readouterr().out.split()).endswith(
        "1 wrong; none of its times is kept; plans choose it by its tier all the same, unless they exclude it "
        "2 wrong; none of its times is kept "
        "3 slow"
    )
