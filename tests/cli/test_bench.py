"""`moe-core bench` on small layers, on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from importlib import metadata

import attrs
import pytest
import torch
from tiny_models import write_tiny_qwen

from moe_core.bench import contenders
from moe_core.bench.contenders import Combination
from moe_core.planner import without_copies
from moe_core.tuning import ceilings
from moe_core.tuning.layers import Batches
from moe_core.tuning.timing import FEWEST_SAMPLES, take_turns

SIZES = ("--num-experts", "4", "--top-k", "2", "--hidden-size", "128", "--intermediate-size", "128")
BIND = Combination.bind
QUICK = ("--device", "cpu", "--repeats", "1", "--tokens", "2")


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    monkeypatch.setitem(ceilings._BUFFER, "cpu", 1 << 16)
    monkeypatch.setitem(ceilings._SQUARE, "cpu", 32)


def test_the_help_says_how_many_samples_a_limit_leaves(call):
    code, out, _ = call("bench", "--help")
    assert code == 0
    assert "after this time, but five each" in " ".join(re.sub("[│|]", " ", out).split())
    assert FEWEST_SAMPLES == 5


def test_tables_of_every_scheme_with_caption(call):
    schemes = ("--quant-scheme", "bf16", "--quant-scheme", "fp8_block128")
    code, out, err = call("bench", *SIZES, *QUICK, *schemes, "--combination", "torch", "--peer", "torch grouped_mm")
    assert code == 0
    text = " ".join(out.split())
    assert "4 experts, top-2, H 128, I 128, bf16" in text
    assert "4 experts, top-2, H 128, I 128, fp8_block128" in text
    assert "moe-core torch: torch:none.standard + torch:torch.standard" in text
    assert re.search(r"torch grouped_mm \d", text)
    assert "torch grouped_mm: not run: takes float weights" in text
    # torch's own text may have a build behind it that its distribution does not name.
    assert re.search(rf"measured on .*torch {re.escape(metadata.version('torch'))}.*B/s", text)
    assert "/6 " not in out
    # Each figure as it comes; what is the same, or is not run, has none.
    layer = "4 experts, top-2, H 128, I 128"
    lines = re.findall(r"^(\d)/6 (.*) [\d.]+ us$", err, flags=re.MULTILINE)
    assert lines == [
        ("1", f"{layer}, bf16, T = 2: moe-core"),
        ("3", f"{layer}, bf16, T = 2: torch grouped_mm"),
        ("4", f"{layer}, fp8_block128, T = 2: moe-core"),
    ]


def test_json_and_file_hold_the_same_and_can_be_shown_again(call, tmp_path):
    file = tmp_path / "figures.json"
    code, out, _ = call("bench", *SIZES, *QUICK, "--peer", "none", "--memory", "--json", "--output", str(file))
    assert code == 0
    assert json.loads(out) == json.loads(file.read_text(encoding="utf-8"))
    (row,) = json.loads(out)["rows"]
    assert row["microseconds"] == row["timing"]["samples"][0]
    code, shown, _ = call("bench", "--read", str(file))
    assert code == 0
    assert "HELD MB" in shown
    assert re.search(r"moe-core +\d", shown)


def test_the_profiler_of_torch_says_nothing(call, monkeypatch):
    """It reads the variable when it first starts, so that its lines would show in a new process alone."""
    for level in (None, "0"):
        monkeypatch.setenv("KINETO_LOG_LEVEL", "0")
        if level is None:
            monkeypatch.delenv("KINETO_LOG_LEVEL")
        assert call("bench", *SIZES, *QUICK, "--peer", "none", "--memory")[0] == 0
        assert os.environ["KINETO_LOG_LEVEL"] == (level or "99")


def test_layers_of_a_model(call, tmp_path):
    pytest.importorskip("transformers")
    write_tiny_qwen(tmp_path / "model", num_hidden_layers=2)
    code, out, _ = call("bench", "--model", str(tmp_path / "model"), *QUICK, "--peer", "none", "--json")
    assert code == 0
    (row,) = json.loads(out)["rows"]
    layer = "layers 0-1 (4 experts, top-2, H 32, I 16)"
    assert (row["layer"], row["scheme"], row["implementation"]) == (layer, "fp32", "moe-core")


def test_layers_of_a_model_run_as_in_one_that_keeps_its_weights(call, monkeypatch, tmp_path):
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 128, "moe_intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    asked = []

    def spied(manager, request, machine):
        asked.append((request.quant.label, request.runner_backend))
        return without_copies(manager, request, machine)

    monkeypatch.setattr(contenders, "without_copies", spied)
    words = ("bench", *QUICK, "--peer", "none", "--combination", "torch.masked")
    assert call(*words, "--model", str(tmp_path))[0] == 0
    assert asked == [("bf16", None), ("bf16", "torch.masked")]
    # Quantized ones, and a layer that nobody has, hold their weights as their runner likes it.
    assert call(*words, "--model", str(tmp_path), "--quant-scheme", "w8a8_int8")[0] == 0
    assert call(*words, *SIZES)[0] == 0
    assert len(asked) == 2


def test_sizes_of_a_named_shape(call, monkeypatch):
    from moe_core.bench import run as comparison

    swept = []
    monkeypatch.setattr(comparison, "run", lambda sweep, shown: swept.append(sweep) or sys.exit(0))
    call("bench", "--shape", "mixtral-8x7b", "--shape", "deepseek-v3", "--activation", "gelu", "--peer", "none")
    (first, request), (second, _) = swept[0].layers
    assert first == "mixtral-8x7b (8 experts, top-2, H 4096, I 14336)"
    assert second.startswith("deepseek-v3")
    assert (request.num_experts, request.hidden_size, request.activation.kind) == (8, 4096, "gelu")
    assert swept[0].tokens == (1, 16, 256)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--shape", "mixtral"), 2, "did you mean 'mixtral-8x7b'"),
        (("--shape", "mixtral-8x7b", "--top-k", "1"), 2, "cannot be combined"),
        (("--peer", "vllm"), 2, "unknown peer 'vllm'"),
        (("--output", "nowhere/figures.json"), 2, "folder nowhere does not exist"),
        (("--read", "nowhere.json"), 2, "results nowhere.json: cannot be read (No such file or directory)"),
        (("--combination", "trito"), 2, "did you mean 'triton'"),
        (("--clock", "sundial"), 2, "unknown clock 'sundial'. Known: cpu, wall."),
        (("--device", "npu"), 2, "npu"),
    ],
)
def test_usage_errors(call, words, code, message):
    sizes = () if {"--shape", "--read"} & {*words} else SIZES
    found, _, err = call("bench", *sizes, *(() if "--read" in words else QUICK), *words)
    assert (found, message in err) == (code, True), err


@pytest.mark.error_path
def test_a_missing_drawing_library_is_said_before_anything_is_measured(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = call("bench", *SIZES, *QUICK, "--plot", "chart.png")
    assert (code, out) == (1, "")
    assert "pip install 'moe-core[bench]'" in err


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--combination", "a + b + c"), "expected a runner, or 'dispatcher + runner'"),
        (("--combination", "torhc"), "unknown runner backend 'torhc'; did you mean 'torch'"),
        (("--peer", "none", "--peer", "liger-kernel"), "--peer none cannot be combined with other peers"),
        (("--threads", "10000000000"), "Invalid value for '--threads'"),
        (("--tokens", "99999999999999999999"), "Invalid value for '--tokens'"),
        (("--device", "meta"), "unknown device type 'meta'"),
        (("--output", "."), "--output: . is there and is no regular file"),
    ],
)
def test_what_is_asked_wrongly_is_refused_before_anything_is_measured(call, monkeypatch, words, message):
    monkeypatch.setattr("moe_core.bench.run.measure_ceilings", None)
    code, _, err = call("bench", *SIZES, *QUICK, *words)
    assert code == 2
    assert message in err


def _without_memory(*arguments):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. If reserved")


@pytest.mark.error_path
def test_memory_that_ends_the_command_is_told_in_a_line(call, monkeypatch):
    monkeypatch.setattr("moe_core.bench.run.measure_ceilings", _without_memory)
    code, out, err = call("bench", *SIZES, *QUICK, "--peer", "none")
    assert (code, out) == (1, "")
    advice = "take fewer tokens, a smaller or quantized model, or another device"
    assert err.splitlines()[-1] == f"error: out of memory: 20.00 GiB were asked for; {advice}"
    assert "Traceback" in call("bench", *SIZES, *QUICK, "--peer", "none", "-v")[2]


@pytest.mark.error_path
def test_no_memory_for_inputs_is_a_row_and_no_figure_at_all_a_failure(call, monkeypatch):
    original = Batches.random

    def scarce(request, num_tokens, *arguments):
        if num_tokens > 2:
            raise RuntimeError("out of memory\nand much more")
        return original(request, num_tokens, *arguments)

    monkeypatch.setattr(Batches, "random", scarce)
    code, out, _ = call("bench", *SIZES, *QUICK, "--peer", "none", "--tokens", "8")
    assert code == 0
    assert "moe-core (T = 8): not run: out of memory" in " ".join(out.split())
    monkeypatch.setattr("moe_core.bench.run.random_weights", _without_memory)
    code, out, _ = call("bench", *SIZES, *QUICK, "--peer", "none")
    assert code == 1
    assert "moe-core: not run: no weights: out of memory: 20.00 GiB were asked for\n" in out
    monkeypatch.setattr("moe_core.bench.run.random_weights", lambda *arguments: scarce(arguments[0], 8))
    code, out, _ = call("bench", *SIZES, *QUICK, "--peer", "none", "--quant-scheme", "w8a8_int8")
    assert code == 1
    assert "moe-core: not run: no weights: " in " ".join(out.split())


@pytest.mark.error_path
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_what_was_measured_before_a_signal_is_shown_and_written(call, monkeypatch, tmp_path, name, code):
    def bind(self, request, weights, batches, device):
        if batches.num_tokens == 2:
            os.kill(os.getpid(), getattr(signal, name))
        return BIND(self, request, weights, batches, device)

    monkeypatch.setattr(Combination, "bind", bind)
    file = tmp_path / "figures.json"
    words = ("bench", *SIZES, *QUICK, "--peer", "none", "--output", str(file))
    told = {"SIGINT": "interrupted", "SIGTERM": "ended by SIGTERM"}[name]
    found, out, err = call(*words)
    assert (found, out, err.splitlines()[-1]) == (code, "", f"{told}; nothing was measured")
    found, out, err = call(*words, "--tokens", "3", "--tokens", "4")
    assert found == code
    assert re.search(r"^4 +floor.*\n +moe-core +\d", out, flags=re.MULTILINE)
    assert err.splitlines()[-1] == f"{told}; what was measured until then: 2 figures, in {file}"
    assert [row["num_tokens"] for row in json.loads(file.read_text(encoding="utf-8"))["rows"]] == [3, 4]
    found, out, _ = call(*words, "--tokens", "3", "--json")
    assert (found, len(json.loads(out)["rows"])) == (code, 1)


@pytest.mark.error_path
def test_what_was_measured_is_written_also_where_nothing_can_be_shown(call, monkeypatch, tmp_path):
    def show(*arguments):
        raise BrokenPipeError

    def stop(entries, repeats, seconds, failed, so_far):
        take_turns(entries, repeats, seconds, failed, so_far)
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_core.bench.run.take_turns", stop)
    monkeypatch.setattr("moe_core.cli.bench._show", show)
    file = tmp_path / "figures.json"
    assert call("bench", *SIZES, *QUICK, "--peer", "none", "--output", str(file))[0] == 130
    assert len(json.loads(file.read_text(encoding="utf-8"))["rows"]) == 1


def test_clocks_are_those_that_there_are():
    from moe_core.cli.bench import _CLOCKS
    from moe_core.tuning.timing import CLOCKS

    assert tuple(CLOCKS) == _CLOCKS


@pytest.mark.error_path
def test_a_chart_that_cannot_be_written_is_refused_before_anything_is_measured(call, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("moe_core.bench.run.measure_ceilings", None)
    code, out, err = call("bench", *SIZES, *QUICK, "--plot", str(tmp_path / "chart.xyz"))
    assert (code, out) == (2, "")
    assert "chart.xyz: no format 'xyz' is known, its ending must be one of " in err


def _doubled(self, *arguments):
    bound = BIND(self, *arguments)
    return attrs.evolve(bound, layer=lambda *inputs: 2 * bound.layer(*inputs))


def _raising(self, *arguments):
    raise RuntimeError("no such tile")


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("bind", "told"),
    [(_doubled, "wrong result: relative error 1, at most "), (_raising, "RuntimeError: no such tile (T = 2, 3)\n")],
)
def test_what_is_wrong_of_ours_is_a_failure_whatever_others_do(call, monkeypatch, bind, told):
    words = ("bench", *SIZES, *QUICK, "--tokens", "3", "--peer", "torch grouped_mm")
    assert call(*words)[0] == 0
    monkeypatch.setattr(Combination, "bind", bind)
    code, out, err = call(*words)
    assert code == 1
    assert re.search(r"torch grouped_mm \d", " ".join(out.split()))
    last = err.partition("error: ")[2]
    assert last.startswith(f"moe-core, 4 experts, top-2, H 128, I 128, bf16: {told}")
    assert last.endswith("(T = 2, 3)\n")


@pytest.mark.error_path
def test_what_was_asked_for_and_cannot_run_is_a_failure_and_what_is_wrong_of_others_is_none(call, monkeypatch):
    code, _, err = call("bench", *SIZES, *QUICK, "--peer", "none", "--combination", "triton")
    assert code == 1
    assert "error: moe-core triton, 4 experts, top-2, H 128, I 128, bf16: no backend combination fits" in err
    monkeypatch.setattr("moe_core.bench.contenders.PeerContender.bind", _raising)
    code, out, _ = call("bench", *SIZES, *QUICK, "--peer", "torch grouped_mm")
    assert (code, "torch grouped_mm failed" in " ".join(out.split())) == (0, True)
