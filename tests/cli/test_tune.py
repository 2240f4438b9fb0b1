from __future__ import annotations

import errno
import itertools
import json
import os
import pwd
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from moe_core.bound import BoundExperts
from moe_core.cli import tune
from moe_core.cli.stopping import INTERRUPTED
from moe_core.measurement_files import MeasurementFile
from moe_core.measurement_sources import MeasurementWarning, user_file
from moe_core.measurements import Time, shape_key
from moe_core.planner import without_copies
from moe_core.probing import probe_environment
from moe_core.tuning import search
from moe_core.tuning.layers import Batches
from moe_core.tuning.search import DeviceLostError, LayerSearch

Call = Callable[..., tuple[int, str, str]]
SIZES = ("--num-experts", "4", "--top-k", "2", "--hidden-size", "32", "--intermediate-size", "16")
QUICK = ("--device", "cpu", "--repeats", "1", "--seconds", "0", "--exclude", "triton")
SHAPE = "E4 K2 H32 I16 ep1 bf16 bf16 silu-gated"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # One sample of a tiny layer tells nothing.
    monkeypatch.setattr(search, "HOPELESS", float("inf"))
    return user_file(probe_environment((), "cpu"))


def test_plans_of_a_model_are_those_of_one_that_keeps_its_weights(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 32, "moe_intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    asked: list[str] = []

    def spied(manager: Any, request: Any, environment: Any, table: Any) -> Any:
        asked.append(shape_key(request))
        return without_copies(manager, request, environment, table)

    monkeypatch.setattr(tune, "without_copies", spied)
    assert call("tune", "--model", str(tmp_path), *QUICK, "--tokens", "1")[0] == 0
    assert asked == [SHAPE]
    _tune(call, "--tokens", "1")
    assert asked == [SHAPE]


@pytest.mark.error_path
def test_without_a_home_there_is_no_cache(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda number: SimpleNamespace(pw_dir=""))
    monkeypatch.setenv("HOME", "")
    code, _, err = _tune(call, "--tokens", "1")
    assert (code, "there is no home folder for a cache (HOME is ''): say --output FILE, or" in err) == (2, True)


def _tune(call: Call, *words: str) -> tuple[int, str, str]:
    return call("tune", *SIZES, *QUICK, *words)


def test_times_go_to_the_cache_and_rank_from_then_on(call: Call, cache: Path) -> None:
    code, out, err = _tune(call, "--tokens", "8", "--tokens", "1")
    assert code == 0
    assert "1 layer at 2 token counts: about 0 s of samples, set-up, compilation and slow kernels on top\n" in err
    assert f"12 times measured; 12 in {cache}" in out.replace("\n", "")
    assert "T=8: " in err
    file = MeasurementFile.read(cache)
    assert set(file.times) == {SHAPE}
    # One sample has no bounds.
    assert all(time.bounds is None for times in file.times[SHAPE].values() for time in times.values())
    assert {count for times in file.times[SHAPE].values() for count in times} == {1, 8}
    code, out, _ = call("resolve", *SIZES, "--json", "--environment", _environment(cache))
    (group,) = json.loads(out)["groups"]
    assert group["decision"]["measurements"][0].startswith("your cache: 12 times of 1 shape, ")
    assert group["decision"]["measurements"][1] == "this layer was measured at T=1 to 8"
    ranked = group["decision"]["workloads"][0]["ranked"]
    assert ranked[0]["microseconds"] is not None
    assert "your cache" in ranked[0]["because"]


def test_winners_that_samples_do_not_tell_apart_stay_so(call: Call, cache: Path, tmp_path: Path) -> None:
    _tune(call, "--tokens", "1", "--repeats", "3")
    file = MeasurementFile.read(cache)
    assert all(time.bounds for times in file.times[SHAPE].values() for time in times.values())
    usual, close, behind = (f"torch:none.{form} + torch:torch.{form}" for form in ("standard", "masked", "contiguous"))
    times = {usual: Time(10.0, (9.0, 11.0)), close: Time(10.5, (10.0, 13.0)), behind: Time(12.0, (11.5, 12.5))}
    target = tmp_path / "times.json"
    attrs.evolve(file, times={SHAPE: {name: {1: time, 4096: time} for name, time in times.items()}}).write(target)
    words = ("resolve", *SIZES, "--environment", _environment(cache), "--measurements", str(target))
    _, out, _ = call(*words, "--explain")
    text = " ".join(out.split())
    assert "chosen by rank (measured times, not told apart from 1 other)" in text
    assert "not told apart from that in place 2: their samples overlap" in text
    _, out, _ = call(*words, "--json")
    (group,) = json.loads(out)["groups"]
    assert group["decision"]["workloads"][0]["not_told_apart"] == [close]
    # Whoever asks for one order or for none of this doubts nothing.
    for sure in ((*words, "--prefer", "torch.standard"), (*words[:-2], "--no-measurements")):
        _, out, _ = call(*sure, "--explain")
        assert "not told apart" not in out


def _environment(cache: Path) -> str:
    """The measured machine as a file: on a machine with a GPU the probed one is another."""
    path = cache.with_suffix(".environment.json")
    path.write_text(json.dumps(json.loads(cache.read_text())["environment"]))
    return str(path)


def test_output_schemes_and_models(call: Call, cache: Path, tmp_path: Path, folder: Path) -> None:
    target = tmp_path / "times.json"
    schemes = ("--quant-scheme", "bf16", "--quant-scheme", "w8a8_int8")
    code, _, err = _tune(call, "--tokens", "1", "--output", str(target), *schemes)
    assert (code, cache.exists()) == (0, False)
    assert [shape.split()[5] for shape in MeasurementFile.read(target).times] == ["bf16", "w8a8_int8"]
    words = ("--model", str(folder), "--tokens", "1", "--tp-size", "2", "--output", str(target))
    code, _, err = call("tune", *QUICK, *words)
    assert code == 0, err
    sizes = json.loads((folder / "config.json").read_text())
    *_, added = MeasurementFile.read(target).times
    assert f" H{sizes['hidden_size']} I{sizes['moe_intermediate_size'] // 2} " in added


def test_named_shapes(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def searched(self: LayerSearch, manager: Any, request: Any, environment: Any, **others: Any) -> None:
        asked.append((request.num_experts, request.quant.label))
        raise DeviceLostError("enough")

    monkeypatch.setattr(LayerSearch, "__init__", searched)
    code, out, err = call("tune", "--shape", "mixtral-8x7b", "--shape", "deepseek-v3", *QUICK)
    assert (code, asked) == (1, [(8, "bf16")])
    assert "deepseek-v3: weights bf16; deepseek-v3 is published with others: --quant-scheme fp8_block128\n" in err
    assert "mixtral-8x7b: " not in err
    assert "nothing was measured" in out
    assert "warning: enough" in err


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), BaseExceptionGroup("of several", [KeyboardInterrupt()])])
def test_an_interrupt_keeps_what_was_measured(
    call: Call, cache: Path, monkeypatch: pytest.MonkeyPatch, interrupt: BaseException
) -> None:
    original = LayerSearch.steps

    def interrupted(self: LayerSearch, *arguments: Any) -> Iterator[Any]:
        yield next(original(self, *arguments))
        raise interrupt

    monkeypatch.setattr(LayerSearch, "steps", interrupted)
    code, out, _ = _tune(call, "--tokens", "1", "--tokens", "2")
    assert code == INTERRUPTED
    assert "interrupted; 6 times measured" in out
    assert "us per forward" in out
    assert MeasurementFile.read(cache).num_times == 6


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_says_what_was_kept(call: Call, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    original, number = LayerSearch.steps, getattr(signal, name)

    def ended(self: LayerSearch, *arguments: Any) -> Iterator[Any]:
        yield next(original(self, *arguments))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(LayerSearch, "steps", ended)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        code, out, _ = _tune(call, "--tokens", "1", "--tokens", "2")
    finally:
        signal.signal(number, before)
    assert code == 128 + number
    assert out.splitlines()[-1] == f"ended by {name}; 6 times measured; 6 in {cache}"


def test_a_wrong_result_is_told_and_nothing_of_it_is_kept(
    call: Call, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tune(call, "--tokens", "1")
    wrong, original = "torch:none.masked + torch:torch.masked", BoundExperts.__call__

    def doubled(self: BoundExperts, *arguments: Any) -> Any:
        return original(self, *arguments) * (1 + (self.plan.routes[0].candidate.full_name == wrong))

    monkeypatch.setattr(BoundExperts, "__call__", doubled)
    code, out, _ = _tune(call, "--tokens", "2")
    assert (code, "10 in" in " ".join(out.split())) == (0, True), out
    assert "T=2: wrong result: relative error 1, at most 0.02 is due to rounding; none of its times is kept" in out
    assert wrong not in MeasurementFile.read(cache).times[SHAPE]


def test_without_time_nothing_is_drawn(call: Call, cache: Path) -> None:
    code, out, err = _tune(call, "--tokens", "1", "--minutes", "0")
    assert (code, cache.exists()) == (1, False)
    assert "silu-gated: time is up before drawing the weights" in err
    assert "nothing was measured" in out


def test_time_that_is_up_keeps_what_was_measured_and_goes_on_with_the_next_layer(
    call: Call, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LayerSearch._step

    def late(self: LayerSearch, count: int, *arguments: Any) -> Any:
        if count > 1 and self.request.quant.label == "bf16":
            self._deadline.require(f"T={count}", 1e9)
        return original(self, count, *arguments)

    monkeypatch.setattr(LayerSearch, "_step", late)
    schemes = ("--quant-scheme", "bf16", "--quant-scheme", "w8a8_int8")
    code, out, err = _tune(call, "--tokens", "1", "--tokens", "2", "--minutes", "9", *schemes)
    assert (code, "ends after 9 minutes, set-up included" in err) == (0, True)
    assert "weights bf16, silu-gated: T=2 would take about 1000000000 s more" in err
    first, second = MeasurementFile.read(cache).times.values()
    assert {count for times in first.values() for count in times} == {1}
    assert {count for times in second.values() for count in times} == {1, 2}
    assert out.count("us per forward") == 2


@pytest.mark.error_path
def test_a_name_that_means_nothing_is_refused_before_anything_is_said(call: Call, cache: Path) -> None:
    code, out, err = _tune(call, "--tokens", "1", "--exclude", "trito")
    assert (code, out, cache.exists()) == (2, "", False)
    assert err.startswith("error: unknown backend 'trito'; did you mean 'triton'?")


@pytest.mark.error_path
def test_a_cache_that_does_not_fit_is_reported(call: Call, cache: Path) -> None:
    _tune(call, "--tokens", "1")
    broken = json.loads(cache.read_text()) | {"schema": 0}
    cache.write_text(json.dumps(broken))
    with warnings.catch_warnings():
        # Elsewhere in the tests warnings are errors.
        warnings.simplefilter("default", MeasurementWarning)
        code, _, err = call("resolve", *SIZES, "--environment", _environment(cache))
    assert code == 0
    assert "expected schema 1, got 0; run moe-core tune again; what it has of that is not used" in err
    code, _, err = _tune(call, "--tokens", "2")
    assert "expected schema 1, got 0; run moe-core tune again; with the first new time it becomes " in err
    assert json.loads(cache.with_suffix(".old.json").read_text()) == broken
    assert MeasurementFile.read(cache).num_times == 6


@pytest.mark.error_path
def test_times_of_an_unknown_number_of_threads_are_told(call: Call, cache: Path) -> None:
    _tune(call, "--tokens", "1")
    file = MeasurementFile.read(cache)
    older = user_file(attrs.evolve(file.environment, threads=0))
    attrs.evolve(file, environment=attrs.evolve(file.environment, threads=0)).write(older)
    cache.unlink()
    code, _, err = _tune(call, "--tokens", "2")
    assert (code, f"warning: measurements {older}: with how many threads they were taken is not known" in err) == (
        0,
        True,
    )
    # There are others now.
    code, _, err = _tune(call, "--tokens", "4")
    assert (code, "warning" in err, older.exists()) == (0, False, True)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shape", "mixtral"), "unknown shape 'mixtral'; did you mean 'mixtral-8x7b'"),
        (("--shape", "mixtral-8x7b", "--top-k", "2"), "--shape cannot be combined with --model or with sizes"),
        (("--tokens", "0"), "Invalid value for '--tokens'"),
        (("--tokens", "99999999999999999999"), "Invalid value for '--tokens'"),
        (("--device", "gpu"), "unknown device type 'gpu'; did you mean 'cuda'?"),
        (("--device", "meta"), "unknown device type 'meta'"),
        ((*SIZES, *QUICK, "--exclude", "tritn"), "unknown backend 'tritn'; did you mean 'triton'"),
    ],
)
def test_asked_wrongly(call: Call, words: tuple[str, ...], message: str) -> None:
    code, _, err = call("tune", *words)
    assert code == 2
    assert message in err


@pytest.mark.error_path
def test_no_memory_for_the_inputs_ends_a_layer_and_keeps_its_times(
    call: Call, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Batches.random

    def scarce(request: Any, num_tokens: int, device: str) -> Batches:
        if num_tokens > 1:
            raise RuntimeError("out of memory\nand much more")
        return original(request, num_tokens, device)

    monkeypatch.setattr(Batches, "random", scarce)
    code, out, err = _tune(call, "--tokens", "1", "--tokens", "4")
    assert (code, MeasurementFile.read(cache).num_times) == (0, 6), err
    assert "6 times measured" in out
    assert "the inputs of T=4 and their answer cannot be made: out of memory\n" in err


def test_another_run_at_the_same_time_is_told_once(call: Call, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LayerSearch._step

    def disturbed(self: LayerSearch, count: int, *arguments: Any) -> Any:
        if count == 4:
            MeasurementFile.read(cache).write(cache)
        return original(self, count, *arguments)

    monkeypatch.setattr(LayerSearch, "_step", disturbed)
    code, _, err = _tune(call, *itertools.chain(*(("--tokens", str(count)) for count in (1, 2, 4, 8))))
    assert (code, err.count(f"warning: another moe-core tune writes to {cache}: all times are kept")) == (0, 1)


@pytest.mark.error_path
def test_a_disk_that_is_full_ends_the_command(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, out, err = _tune(call, "--tokens", "1", "--quant-scheme", "bf16", "--quant-scheme", "w8a8_int8")
    assert (code, "us per forward" in out) == (1, True)
    told = "cannot be written ([Errno 28] No space left on device); times of the last token count are only in the table"
    assert err.count(told) == 1


# resolve --------------------------------------------------------------------------------------------------------


def test_resolve_with_a_file_and_with_none(call: Call, cache: Path, tmp_path: Path) -> None:
    target = tmp_path / "times.json"
    _tune(call, "--tokens", "1", "--output", str(target))
    machine = ("--environment", _environment(target))
    code, out, _ = call("resolve", *SIZES, *machine, "--measurements", str(target), "--explain")
    assert code == 0
    assert "measurements times.json: 6 times of 1 shape," in " ".join(out.split())
    _, out, _ = call("resolve", *SIZES, *machine, "--explain", "--no-measurements")
    assert "measured" not in out


@pytest.mark.error_path
def test_resolve_with_times_of_another_card(call: Call, tmp_path: Path) -> None:
    target = tmp_path / "times.json"
    _tune(call, "--tokens", "1", "--output", str(target))
    code, _, err = call("resolve", *SIZES, "--environment", "h100", "--measurements", str(target))
    assert (code, "the machine is NVIDIA H100" in err) == (2, True)
    code, _, err = call("resolve", *SIZES, "--measurements", str(target), "--no-measurements")
    assert (code, "cannot be combined" in err) == (2, True)
