"""The comparison: who runs, in which order, and that whatever goes wrong becomes a row."""

from __future__ import annotations

import itertools
import re
from importlib.metadata import version

import attrs
import pytest
import torch
from measured import measured

from moe_core.bench import OURS, contenders
from moe_core.bench import run as comparison
from moe_core.bench.contenders import Combination
from moe_core.bench.memory import activation_bytes, held_bytes
from moe_core.bench.peers import PEERS, Peer, find_peers
from moe_core.bench.report import Report
from moe_core.bench.run import Sweep, run
from moe_core.errors import SpecError, UnknownNameError
from moe_core.manager import default_manager
from moe_core.probing import probe_environment
from moe_core.quant import FP8_BLOCK128
from moe_core.tuning import ceilings
from moe_core.tuning.layers import Batches
from moe_core.tuning.shapes import LayerShape

SHAPE = LayerShape(4, 2, 64, 32)
HAND_WRITTEN = PEERS[0]


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    monkeypatch.setitem(ceilings._BUFFER, "cpu", 1 << 16)
    monkeypatch.setitem(ceilings._SQUARE, "cpu", 32)


def _peer(name, bind, **fields):
    return Peer(name=name, module="torch", install="", bind=bind, **fields)


def _sweep(**changes):
    fields = {
        "layers": (("small", SHAPE.request()),),
        "tokens": (3,),
        "combinations": (Combination(),),
        "peers": (),
        "environment": probe_environment(default_manager().modules_required(), "cpu"),
        "repeats": 2,
    }
    return Sweep(**{**fields, **changes})


def _rows(**changes):
    return {row.implementation: row for row in run(_sweep(**changes), lambda *_: None).rows}


def test_ours_and_peers_are_timed_and_compared():
    rows = _rows(combinations=(Combination(), Combination("none.masked + torch.masked")), peers=(HAND_WRITTEN,))
    assert list(rows) == [OURS, f"{OURS} none.masked + torch.masked", "torch grouped_mm"]
    for row in rows.values():
        assert row.problem == row.note == ""
        assert (row.timing.method, len(row.timing.samples)) == ("wall", 2)
        assert 0 < row.error < 2e-2
        assert row.floor > 0
    assert rows[f"{OURS} none.masked + torch.masked"].runs == "torch:none.masked + torch:torch.masked"
    assert rows["torch grouped_mm"].runs.startswith("torch 2.")


def test_each_step_and_each_sample_is_told_before_it_begins():
    told = []
    _rows(told=told.append, peers=(HAND_WRITTEN,))
    where = "small, bf16, T = 3: "
    both = (OURS, "torch grouped_mm")
    # Those before are told, too.
    far = [so_far for line in told if (so_far := line.partition(" of 2")[2])]
    assert all(re.fullmatch(r", [0-9.e+]+ us so far", so_far) for so_far in far)
    assert [re.sub(r", [^,]* us so far$", "", line) for line in told] == [
        "the rates of this machine",
        "weights of small, bf16",
        f"{where}inputs, and the layer in fp32",
        *(f"{where}{name}" for name in both),
        *(f"{where}{name}, sample {number} of 2" for number in (1, 2) for name in both),
    ]
    assert len(far) == 2


def test_one_combination_under_two_names_is_timed_once():
    names = (None, "torch", "none.standard + torch", "torch.masked")
    rows = _rows(combinations=tuple(map(Combination, names)))
    timed = {name: row.timing is not None for name, row in rows.items()}
    assert timed == {
        OURS: True,
        f"{OURS} torch": False,
        f"{OURS} none.standard + torch": False,
        f"{OURS} torch.masked": True,
    }
    same = rows[f"{OURS} torch"]
    assert (same.runs, same.problem) == (rows[OURS].runs, "")
    assert same.note == f"the same as {OURS}, not timed again"


def test_each_row_says_what_ran_with_its_number_of_tokens(monkeypatch):
    few, many = (f"torch:none.{kind} + torch:torch.{kind}" for kind in ("standard", "masked"))
    times = {few: {1: 1.0, 16: 2.0, 256: 9.0}, many: {1: 5.0, 16: 6.0, 256: 7.0}}
    table = measured(SHAPE.request(), times)
    original = contenders.MoELayer
    monkeypatch.setattr(
        contenders, "MoELayer", lambda *of_it, **named: original(*of_it, **{**named, "measurements": table})
    )
    rows = run(_sweep(tokens=(1, 8, 300)), lambda *_: None).rows
    assert [(row.num_tokens, row.runs) for row in rows] == [(1, few), (8, few), (300, many)]


def test_a_peer_that_fails_keeps_its_row_with_the_error():
    def fails(*arguments):
        raise AssertionError("no such tile\nand much more")

    def fails_later(request, weights):
        return fails

    rows = _rows(peers=(_peer("binding", fails), _peer("calling", fails_later)))
    assert rows["binding"].problem == rows["calling"].problem == "AssertionError: no such tile"
    assert rows["binding"].timing is rows["calling"].timing is None
    assert rows[OURS].timing is not None


@pytest.mark.parametrize("good_calls", [0, 8])
def test_a_peer_that_exits_or_fails_in_a_turn_is_a_row_and_an_interrupt_ends(good_calls):
    def peer(raised):
        def bind(request, weights):
            layer, calls = HAND_WRITTEN.bind(request, weights), itertools.count()

            def call(*inputs):
                if next(calls) >= good_calls:
                    raise raised
                return layer(*inputs)

            return call

        return _peer("failing", bind)

    rows = _rows(peers=(peer(SystemExit(3)), HAND_WRITTEN))
    assert (rows["failing"].problem, rows["failing"].timing) == ("SystemExit: 3", None)
    assert all(len(rows[name].timing.samples) == 2 for name in (OURS, HAND_WRITTEN.name))
    with pytest.raises(KeyboardInterrupt):
        _rows(peers=(peer(KeyboardInterrupt()),))


def test_a_wrong_result_is_not_timed():
    def swapped(request, weights):
        halves = weights["w13"].chunk(2, dim=1)
        return HAND_WRITTEN.bind(request, {**weights, "w13": torch.cat(halves[::-1], dim=1)})

    row = _rows(peers=(_peer("swapped", swapped),))["swapped"]
    assert row.timing is None
    assert row.problem.startswith("wrong result: relative error ")


def test_a_peer_that_would_not_fit_into_memory_is_not_tried(monkeypatch):
    monkeypatch.setattr(comparison, "free_bytes", lambda device: 10**9)
    hungry = attrs.evolve(HAND_WRITTEN, extra_bytes=lambda request, num_tokens: num_tokens * 3 * 10**8)
    rows = run(_sweep(tokens=(2, 3), peers=(hungry,)), lambda *_: None).rows
    fits, does_not = (row for row in rows if row.implementation == hungry.name)
    assert fits.timing is not None
    assert does_not.problem == "not run: needs 1 GB for one forward, 1 GB are free"


def test_a_combination_that_cannot_run_is_a_row_and_one_that_is_unknown_an_error():
    row = _rows(combinations=(Combination("triton"),))[f"{OURS} triton"]
    assert row.timing is None
    assert "no backend combination fits" in row.problem
    with pytest.raises(UnknownNameError, match="trito"):
        _rows(combinations=(Combination("trito"),))


@pytest.mark.error_path
@pytest.mark.parametrize("pins", ["a + b + c", "a +", "+", ""])
def test_combinations_are_one_or_two_names(pins):
    with pytest.raises(SpecError, match="expected a runner, or 'dispatcher \\+ runner'"):
        Combination(pins).request(SHAPE.request(), 1)


def test_the_largest_number_of_tokens_runs_first_and_rows_are_sorted():
    seen = []

    def noted(request, weights):
        layer = HAND_WRITTEN.bind(request, weights)

        def call(hidden_states, topk_ids, topk_weights):
            seen.append(len(hidden_states))
            return layer(hidden_states, topk_ids, topk_weights)

        return call

    shown = []
    report = run(_sweep(tokens=(1, 5, 2, 5), peers=(_peer("noted", noted),)), lambda *of_it: shown.append(of_it))
    assert list(dict.fromkeys(seen)) == [5, 2, 1]
    assert [row.num_tokens for row in report.rows if row.implementation == "noted"] == [1, 2, 5]
    # After each of two rounds, and when both rows are finished.
    assert [(len(so_far.rows), len(finished)) for so_far, finished in shown] == [
        (count, added) for count in (2, 4, 6) for added in (0, 0, 2)
    ]
    notes = [[row.note for row in so_far.rows if row.num_tokens == 5] for so_far, _ in shown[:3]]
    assert notes == [["1 of 2 samples"] * 2, ["2 of 2 samples"] * 2, [""] * 2]
    assert shown[-1][0] == report


@pytest.mark.error_path
def test_what_was_measured_before_an_interrupt_is_known():
    def interrupts(request, weights):
        layer, calls = HAND_WRITTEN.bind(request, weights), itertools.count()

        def call(*tokens):
            # One is compared, two warm up, and then a first round of samples is whole.
            if next(calls) == 3 + len(Batches.random(request, 3, "cpu").calls(layer)):
                raise KeyboardInterrupt
            return layer(*tokens)

        return call

    shown = []
    with pytest.raises(KeyboardInterrupt):
        run(_sweep(peers=(_peer("interrupts", interrupts),), repeats=3), lambda *of_it: shown.append(of_it))
    ((report, finished),) = shown
    assert [(row.implementation, row.note, len(row.timing.samples)) for row in report.rows] == [
        (OURS, "1 of 3 samples", 1),
        ("interrupts", "1 of 3 samples", 1),
    ]
    assert finished == ()


def test_schemes_of_one_layer_take_turns_on_a_cpu(monkeypatch):
    turns = []
    take_turns = comparison.take_turns
    monkeypatch.setattr(
        comparison, "take_turns", lambda ready, *rest: turns.append(len(ready)) or take_turns(ready, *rest)
    )
    shape = LayerShape(4, 2, 128, 128)
    layers = (
        ("a", shape.request()),
        ("b", SHAPE.request()),
        ("a", shape.request(quant=FP8_BLOCK128)),
    )
    report = run(_sweep(layers=layers, tokens=(1,)), lambda *_: None)
    assert turns == [2, 1]
    assert [(row.layer, row.scheme) for row in report.rows] == [("a", "bf16"), ("b", "bf16"), ("a", "fp8_block128")]
    assert set(report.machine.ceilings.flops_per_us) == {"bf16", "fp8"}


def test_host_time_and_memory_where_they_are_asked_for():
    rows = run(_sweep(tokens=(1, 9), with_issue_time=True, with_memory=True), lambda *_: None).rows
    one, more = rows
    assert one.issue_microseconds > 0
    assert more.issue_microseconds is None
    # 2I + I + H values of two bytes, for two experts of each token.
    assert more.activation_bytes == 9 * 2 * 2 * (3 * 32 + 64)
    # At least the result.
    assert more.held_bytes >= 9 * 64 * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_what_can_be_captured_is_and_the_rest_says_why_not():
    environment = probe_environment(default_manager().modules_required(), "cuda")
    peers = find_peers((), "cuda")
    shape = LayerShape(8, 2, 256, 128)
    options = {"with_memory": True, "with_issue_time": True}
    sweep = _sweep(
        layers=(("small", shape.request()),), tokens=(1, 70), peers=peers, environment=environment, **options
    )
    for row in run(sweep, lambda *_: None).rows:
        assert row.problem == ""
        assert (row.timing.method == "graph") == (not row.note.startswith("not captured: ")), row
        assert row.held_bytes >= row.num_tokens * 256 * 2


def test_held_bytes_are_those_of_one_moment():
    def call():
        first = torch.empty(1000, dtype=torch.uint8)
        del first
        return torch.empty(3000, dtype=torch.uint8), torch.empty(500, dtype=torch.uint8)

    assert held_bytes(call, "cpu") == pytest.approx(3500, abs=256)
    assert activation_bytes(SHAPE.request(dtype="fp32"), 1) == 2 * 4 * (96 + 64)


def test_a_report_is_the_same_after_writing_and_reading(tmp_path):
    report = run(_sweep(peers=(_peer("broken", lambda *arguments: 1 / 0),)), lambda *_: None)
    report.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json") == report
    assert report.machine.caption.startswith(report.machine.device)
    assert f"torch {version('torch').split('+')[0]}" in report.machine.caption


@pytest.mark.error_path
@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"schema": 1, "schema": 1}',
        "[" * 100_000,
        '{"schema": 99}',
        '{"schema": 1, "machine": {}, "rows": []}',
    ],
)
def test_other_files_are_refused(tmp_path, content):
    file = tmp_path / "other.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(SpecError, match="not the JSON of moe-core bench"):
        Report.read(file)
