"""`moe-core quantize` on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

EXPERT = "model.layers.1.mlp.experts.2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=3,
        num_experts_per_tok=2,
        dtype="bfloat16",
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    target = tmp_path_factory.mktemp("model")
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(target)
    return target


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 3, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("words", "stored"),
    [
        (("fp8_block",), "fp8_block128, stored as scaled"),
        (("w8a8_int8", "--ecosystem", "modelslim"), "w8a8_int8, stored as modelslim_w8a8"),
        (("nvfp4", "--input-scale", "0.5"), "nvfp4, stored as modelopt_nvfp4"),
    ],
)
def test_a_checkpoint_is_written_and_described(call, folder, tmp_path, words, stored):
    out = tmp_path / "new" / "out"
    code, printed, err = call("quantize", str(folder), str(out), "--scheme", *words)
    assert (code, err) == (0, "")
    assert f"scheme     {stored}" in printed
    assert "experts    6: 0.1 MB -> 0.0 MB" in printed
    assert (out / "generation_config.json").is_file()
    assert ("quantization_config" in json.loads((out / "config.json").read_text())) == ("modelslim" not in stored)


def test_one_input_scale_for_all(call, folder, tmp_path):
    code, _, _ = call("quantize", str(folder), str(tmp_path / "out"), "--scheme", "nvfp4", "--input-scale", "0.3")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scales = [tensor for name, tensor in tensors.items() if name.endswith(".input_scale")]
    assert code == 0
    assert len(scales) == 18
    assert all(scale == torch.tensor(0.3) for scale in scales)


def test_calibration(call, folder, text, tmp_path):
    words = ("--scheme", "nvfp4", "--calibrate", str(text), "--window", "50")
    code, _, err = call("quantize", str(folder), str(tmp_path / "out"), *words)
    assert code == 0
    assert "calibrating over 135 tokens: " in err
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    first, second = tensors[f"{EXPERT}.gate_proj.input_scale"], tensors[f"{EXPERT}.down_proj.input_scale"]
    assert first == tensors[f"{EXPERT}.up_proj.input_scale"]
    # Normed tokens have components of order 1; those between the projections of this model are far smaller.
    assert 0.5 < first * 2688 < 8
    assert 0 < second < first


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scheme", "nvfp5"], "unknown scheme to write 'nvfp5'; did you mean 'nvfp4'"),
        (["--scheme", "mxfp4", "--ecosystem", "modelopt"], "'mxfp4' is written for compressed_tensors, not"),
        (["--scheme", "nvfp4"], "stores activation scales: find them with --calibrate FILE"),
        (["--scheme", "mxfp4", "--input-scale", "1"], "--calibrate and --input-scale do not apply"),
        (["--scheme", "nvfp4", "--input-scale", "-1"], "finite number > 0"),
        (["--scheme", "nvfp4", "--calibrate", "/no/file"], "/no/file: not readable"),
        ([], "--scheme"),
    ],
)
def test_asked_wrongly(call, folder, tmp_path, words, message):
    code, out, err = call("quantize", str(folder), str(tmp_path / "out"), *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert not any(tmp_path.iterdir())


@pytest.mark.error_path
def test_refused_before_the_model_is_loaded(call, folder, text, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_core.cli.model_loading.load_model", lambda *_: pytest.fail("the model was loaded"))
    words = ("--scheme", "nvfp4", "--calibrate", str(text))
    code, _, err = call("quantize", str(folder), str(tmp_path), *words)
    assert code == 2
    assert f"{tmp_path} exists and is not an empty folder" in err
    code, _, err = call("quantize", str(tmp_path / "none"), str(tmp_path / "out"), *words)
    assert code == 2
    assert "no model at" in err
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    (quantized / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    code, _, err = call("quantize", str(quantized), str(tmp_path / "out"), *words)
    assert code == 2
    assert "quantized already" in err


@pytest.mark.error_path
def test_an_empty_calibration_text(call, folder, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    words = ("--scheme", "nvfp4", "--calibrate", str(tmp_path / "empty.txt"))
    code, _, err = call("quantize", str(folder), str(tmp_path / "out"), *words)
    assert code == 2
    assert "the calibration text is empty" in err
