"""`moe-core quantize` on a tiny random model."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write_tiny_qwen

from moe_core.cli import model_loading
from moe_core.cli.stopping import exit_on_signals
from moe_core.discovery import Found, load
from moe_core.quantizer.words import SHORT_WORDS

pytest.importorskip("transformers")

EXPERT = "model.layers.1.mlp.experts.2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("model")
    write_tiny_qwen(target, hidden_size=64, moe_intermediate_size=32, num_experts=3, dtype="bfloat16")
    return target


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 3, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("words", "stored"),
    [
        (("fp8_block",), "fp8_block128 (fp8_block is short for it), in the layout of transformers"),
        (("fp8_block128",), "fp8_block128, in the layout of transformers"),
        (("mxfp4",), "mxfp4_w4a16 (mxfp4 is short for it), in the layout of compressed_tensors"),
        (("w8a8_int8", "--ecosystem", "modelslim"), "w8a8_int8, in the layout of modelslim"),
        (("nvfp4", "--input-scale", "0.5"), "nvfp4, in the layout of modelopt"),
    ],
)
def test_a_checkpoint_is_written_and_described(call, folder, tmp_path, words, stored):
    out = tmp_path / "new" / "out"
    code, printed, err = call("quantize", "--model", str(folder), "--output", str(out), "--scheme", *words)
    shown = " ".join(printed.split())
    assert code == 0
    writing = rf"writing {re.match('[a-z0-9_]+', stored)[0]} for [a-z_]+"
    steps = (rf"{step} \.\.\.\n{step}: [0-9.]+ s\n" for step in ("importing torch", writing))
    assert re.fullmatch("".join(steps), err)
    assert f"scheme {stored}" in shown
    assert "experts 6: 0.1 MB -> 0.0 MB" in shown
    assert (out / "generation_config.json").is_file()
    assert ("quantization_config" in json.loads((out / "config.json").read_text())) == ("modelslim" not in stored)


def test_help_says_what_short_words_stand_for(call):
    code, printed, _ = call("quantize", "--help")
    words = " ".join(printed.split())
    assert code == 0
    assert SHORT_WORDS
    for word, name in SHORT_WORDS.items():
        assert f"{word} for {name}" in words


def test_one_input_scale_for_all(call, folder, tmp_path):
    code, _, _ = call(
        "quantize",
        "--model",
        str(folder),
        "--output",
        str(tmp_path / "out"),
        "--scheme",
        "nvfp4",
        "--input-scale",
        "0.3",
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scales = [tensor for name, tensor in tensors.items() if name.endswith(".input_scale")]
    assert code == 0
    assert len(scales) == 18
    assert all(scale == torch.tensor(0.3) for scale in scales)


def test_calibration(call, folder, text, tmp_path):
    words = ("--scheme", "nvfp4", "--calibrate", str(text), "--window", "50")
    code, _, err = call("quantize", "--model", str(folder), "--output", str(tmp_path / "out"), *words)
    assert code == 0
    assert "calibrating over 135 tokens: " in err
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    first, second = tensors[f"{EXPERT}.gate_proj.input_scale"], tensors[f"{EXPERT}.down_proj.input_scale"]
    assert first == tensors[f"{EXPERT}.up_proj.input_scale"]
    # Normed tokens have components of order 1; those between the projections of this model are far smaller.
    assert 0.5 < first * 2688 < 8
    assert 0 < second < first


def test_calibration_on_cpu_is_done_in_fp32(call, folder, text, tmp_path, monkeypatch):
    load, dtypes = model_loading.load_model, []

    def watched(*arguments):
        network = load(*arguments)
        dtypes.append(network.dtype)
        return network

    monkeypatch.setattr(model_loading, "load_model", watched)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    words = ("--scheme", "nvfp4", "--calibrate", str(text))
    code, _, _ = call("quantize", "--model", str(folder), "--output", str(tmp_path / "out"), *words)
    assert code == 0
    assert dtypes == [torch.float32]


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scheme", "nvfp5"], "unknown scheme to write 'nvfp5'; did you mean 'nvfp4'"),
        (["--scheme", "w4a9"], "did you mean 'w4a8'? Known: fp8_block128, "),
        (["--scheme", "fp8_tensor"], "scheme 'fp8_tensor' is read, but not written; written are fp8_block128, nvfp4"),
        (["--scheme", "mxfp4", "--ecosystem", "modelopt"], "'mxfp4_w4a16' is written for compressed_tensors, not"),
        (["--scheme", "nvfp4"], "stores activation scales: find them with --calibrate FILE"),
        (["--scheme", "mxfp4", "--input-scale", "1"], "--calibrate and --input-scale do not apply"),
        (
            ["--scheme", "nvfp4", "--input-scale", "-1"],
            "--input-scale: expected a scale from 1.2e-38 to 3.4e+38, got",
        ),
        (["--scheme", "nvfp4", "--input-scale", "nan"], "--input-scale: expected a scale"),
        # It would be 0 in the checkpoint.
        (["--scheme", "nvfp4", "--input-scale", "1e-50"], "--input-scale: expected a scale"),
        (["--scheme", "nvfp4", "--calibrate", "/no/file"], "/no/file: cannot be read"),
        ([], "--scheme"),
    ],
)
def test_asked_wrongly(call, folder, tmp_path, words, message):
    code, out, err = call("quantize", "--model", str(folder), "--output", str(tmp_path / "out"), *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert not any(tmp_path.iterdir())


@pytest.mark.error_path
def test_refused_before_the_model_is_loaded(call, folder, text, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_core.cli.model_loading.load_model", lambda *_: pytest.fail("the model was loaded"))
    words = ("--scheme", "nvfp4", "--calibrate", str(text))
    code, _, err = call("quantize", "--model", str(folder), "--output", str(tmp_path), *words)
    assert code == 2
    assert f"{tmp_path} exists and is not an empty folder" in err
    code, _, err = call("quantize", "--model", str(tmp_path / "none"), "--output", str(tmp_path / "out"), *words)
    assert code == 2
    assert "no model at" in err
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    (quantized / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    code, _, err = call("quantize", "--model", str(quantized), "--output", str(tmp_path / "out"), *words)
    assert code == 2
    assert "is quantized already (its config.json says so, by 'fp8')" in err


@pytest.mark.error_path
def test_an_empty_calibration_text(call, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_core.cli.model_loading.load_model", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "empty.txt").write_text("")
    words = ("--scheme", "nvfp4", "--calibrate", str(tmp_path / "empty.txt"))
    code, _, err = call("quantize", "--model", str(folder), "--output", str(tmp_path / "out"), *words)
    assert code == 2
    assert "the calibration text is empty" in err


@pytest.mark.error_path
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_leaves_nothing_behind(python, folder, tmp_path, name):
    # Twice: the second one must not end the cleaning up.
    code = f"""
import os, signal, sys
from moe_core.cli import main
from moe_core.quantizer import checkpoint, output
signal.signal(signal.{name}, signal.SIG_DFL)

def kill(*_):
    print(*os.listdir({str(tmp_path / "new")!r}), flush=True)
    os.kill(os.getpid(), signal.{name})

rmtree = output.shutil.rmtree

def interrupted(*arguments, **more):
    os.kill(os.getpid(), signal.{name})
    rmtree(*arguments, **more)

output.shutil.rmtree = interrupted
output.ShardWriter.close = kill
main(["quantize", "--model", {str(folder)!r}, "--output", {str(tmp_path / "new" / "out")!r}, "--scheme", "w8a8_int8"])
"""
    stopped = python(code)
    assert re.fullmatch(r"\.out\..*\.partial\n", stopped.stdout)
    assert stopped.returncode == 128 + getattr(signal, name), stopped.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.error_path
def test_signals_that_are_ignored_or_handled_stay_so():
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with exit_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.error_path
@pytest.mark.parametrize("grouped", [False, True])
def test_a_signal_is_no_failure_of_the_plugin_that_it_meets(grouped):
    def module():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            # As task groups do.
            raise BaseExceptionGroup("tasks", [error]) if grouped else error from None
        pytest.fail("it went on")

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as stopped, exit_on_signals():
            load(Found(name="toy", load=module))
        assert stopped.value.code == 143
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.error_path
def test_what_a_killed_run_left_is_named(call, folder, tmp_path):
    stale = tmp_path / ".out.abc.partial"
    stale.mkdir()
    code, _, err = call("quantize", "--model", str(folder), "--output", str(tmp_path / "out"), "--scheme", "w8a8_int8")
    assert code == 0
    assert f"warning: {stale} is left of a run that was killed" in err
    assert stale.is_dir()


@pytest.mark.error_path
@pytest.mark.parametrize("typo", ["fp8", "fp8_blok", "fp8_blok128", "fp8_block_128", "f8_block", "fp8-block"])
def test_both_options_for_schemes_suggest_the_same(typo, call, folder, tmp_path):
    _, _, err = call("quantize", "--model", str(folder), "--output", str(tmp_path / "out"), "--scheme", typo)
    _, _, other = call("resolve", "--environment", "cpu", "--quant-scheme", typo)
    assert "did you mean 'fp8_block128'?" in err
    assert "did you mean 'fp8_block128'?" in other
