"""`moe-core eval` on a tiny random model and a noisy copy of it."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_core.errors import counted
from moe_core.quantizer.checkpoint import quantize_checkpoint

transformers = pytest.importorskip("transformers")

#: The model's default context is far longer than the sample.
SAMPLE = "Both ends of the piece: é, ü; the rest is plain. " * 6


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sample.txt"
    path.write_text(SAMPLE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def noisy(folder, tmp_path_factory) -> Path:
    """The model with other experts: random weights of this size are far above the initial ones."""
    target = tmp_path_factory.mktemp("noisy")
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = torch.randn(tensor.shape, generator=generator) * 0.3
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _log_probabilities(folder: Path, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[targets, V]` from transformers' own experts, windows side by side, and the targets."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    ids = torch.tensor(list(SAMPLE.encode()))
    with torch.no_grad():
        rows = [model(piece[None]).logits[0, :-1].double().log_softmax(-1) for piece in ids.split(window)]
    return torch.cat(rows), torch.cat([piece[1:] for piece in ids.split(window)])


def _document(call, *words):
    code, out, _ = call("eval", "--model", *map(str, words), "--device", "cpu", "--json")
    assert code == 0
    return json.loads(out)


def test_figures_against_eager_experts(call, folder, noisy, sample):
    found = _document(call, noisy, "--text", sample, "--against", folder, "--window", 40)
    (model, targets), (reference, _) = (_log_probabilities(path, 40) for path in (noisy, folder))
    own, other = (rows.gather(-1, targets[:, None])[:, 0] for rows in (model, reference))
    divergence = (reference.exp() * (reference - model)).sum(-1)
    comparison = found["comparison"]
    # fp32 sums in another order: 1e-6 of logits of order one; the divergence is a small difference of them.
    assert found["model"]["log_likelihood"]["mean"] == pytest.approx(float(own.mean()), rel=1e-5)
    assert found["against"]["log_likelihood"]["mean"] == pytest.approx(float(other.mean()), rel=1e-5)
    assert comparison["kl_divergence"]["mean"] == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert comparison["kl_divergence"]["largest"] == pytest.approx(float(divergence.max()), rel=1e-3)
    assert comparison["log_likelihood_difference"]["mean"] == pytest.approx(float((own - other).mean()), rel=1e-2)
    assert comparison["top1_agreement"]["mean"] == pytest.approx(
        float((model.argmax(-1) == reference.argmax(-1)).double().mean()), abs=1.5 / len(targets)
    )
    assert comparison["kl_divergence"]["mean"] > 1e-4


def test_a_quantized_model(call, folder, sample, tmp_path):
    quantize_checkpoint(folder, tmp_path / "int8", "w8a8_int8")
    found = _document(call, tmp_path / "int8", "--text", sample, "--against", folder, "--window", 40)
    assert found["model"]["schemes"] == ["w8a8_int8"]
    assert found["against"]["schemes"] == ["fp32"]
    # The experts of this model are small beside the rest of it, and int8 keeps two digits of them.
    assert 0 < found["comparison"]["kl_divergence"]["mean"] < 1e-6


def test_the_document(call, folder, sample):
    found = _document(call, folder, "--text", sample, "--window", 100, "--stride", 60)
    num_bytes = len(SAMPLE.encode())
    assert found["schema"] == 1
    assert found["text"] == {"file": str(sample), "bytes": num_bytes, "tokens": num_bytes}
    assert found["windows"] == {"tokens": 100, "stride": 60, "count": 5, "predicted_tokens": num_bytes - 1}
    model = found["model"]
    assert model["perplexity_per_token"]["mean"] == pytest.approx(math.exp(-model["log_likelihood"]["mean"]))
    assert model["perplexity_per_byte"] == model["perplexity_per_token"]
    assert (model["folder"], model["kind"], model["dtype"]) == (str(folder), "Qwen3MoeForCausalLM", "float32")
    assert model["schemes"] == ["fp32"]
    assert model["routes"] == ["any: torch:none.standard + torch:torch.standard, fp32 by runner"]
    assert found["against"] is None
    assert found["comparison"] is None


def test_the_tables(call, folder, noisy, sample):
    words = (
        "eval",
        "--model",
        str(noisy),
        "--text",
        str(sample),
        "--against",
        str(folder),
        "--window",
        "40",
        "--device",
        "cpu",
    )
    code, out, err = call(*words)
    text = " ".join(out.split())
    assert code == 0
    assert f"{len(SAMPLE.encode())} tokens" in text
    assert "in 8 windows of 40, stride 40" in text
    assert len(re.findall(r"(model|against) \d+\.\d{4} \(\d\.\d{4}\) ", text)) == 2
    assert re.search(r"KL\(against \|\| model\) \d\.\d\de-\d\d \(\d\.\de-\d\d\) nats per token", text)
    assert re.search(r"same top token \d+\.\d\d \(\d+\.\d\d\) % of the tokens", text)
    assert re.search(r"log-likelihood difference -?\d\.\d\de-\d\d \(\d\.\de-\d\d\) nats per token", text)
    assert "standard error" in text
    for stage in (f"loading {noisy}", f"loading {folder}", "evaluating"):
        assert f"{stage}: " in err


def test_one_window_has_no_standard_error(call, folder, sample):
    found = _document(call, folder, "--text", sample)
    assert found["windows"]["count"] == 1
    assert found["model"]["log_likelihood"]["standard_error"] is None
    code, out, _ = call("eval", "--model", str(folder), "--text", str(sample), "--device", "cpu")
    assert code == 0
    assert "(" not in out[out.index("perplexity per token") :]
    assert "standard error" not in out


def test_dtype_and_pins(call, folder, sample):
    words = ("--dtype", "bf16", "--runner-backend", "torch", "--a2a-backend", "none.masked")
    found = _document(call, folder, "--text", sample, *words, "--against", folder)
    assert found["model"]["dtype"] == found["against"]["dtype"] == "bfloat16"
    assert found["model"]["routes"] == ["any: torch:none.masked + torch:torch.masked, bf16 by runner"]
    assert found["against"]["routes"] == ["any: torch:none.standard + torch:torch.standard, bf16 by runner"]


def test_the_default_window_is_the_models_context(call, folder, sample, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    assert _document(call, tmp_path, "--text", sample)["windows"]["tokens"] == 64
    assert _document(call, folder, "--text", sample)["windows"]["tokens"] == 2048
    assert _document(call, folder, "--text", sample, "--against", tmp_path)["windows"]["tokens"] == 64
    code, _, err = call("eval", "--model", str(tmp_path), "--text", str(sample), "--window", "65", "--device", "cpu")
    assert code == 2
    assert f"a window of 65 tokens is longer than the context of {tmp_path}: 64" in err


def _with_vocabulary(folder: Path, target: Path, size: int) -> None:
    """A copy of the model that knows `size` tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(size)
    model.save_pretrained(target)


@pytest.mark.error_path
def test_vocabularies_differ(call, folder, sample, tmp_path):
    _with_vocabulary(folder, tmp_path, 300)
    code, out, err = call(
        "eval", "--model", str(folder), "--text", str(sample), "--against", str(tmp_path), "--device", "cpu"
    )
    assert (code, out) == (2, "")
    assert f"{folder} has a vocabulary of 256 tokens, {tmp_path} of 300" in err


@pytest.mark.error_path
def test_tokenizers_differ(call, folder, sample, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    code, out, err = call(
        "eval", "--model", str(folder), "--text", str(sample), "--against", str(tmp_path), "--device", "cpu"
    )
    assert (code, out) == (2, "")
    assert f"the tokenizers of {folder} and {tmp_path} cut the text into different tokens" in err


@pytest.mark.error_path
@pytest.mark.parametrize("content", [b"", b"a"])
def test_a_text_that_is_too_short(call, folder, tmp_path, content):
    path = tmp_path / "short.txt"
    path.write_bytes(content)
    code, out, err = call("eval", "--model", str(folder), "--text", str(path), "--device", "cpu")
    assert (code, out) == (2, "")
    assert f"the text has {counted(len(content), 'token')}; predicting needs at least 2" in err


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("a", (), "the text has 1 token;"),
        (SAMPLE, ("--window", "20", "--stride", "21"), "stride 21 is not in 1..20"),
        (SAMPLE, ("--window", "999999"), "a window of 999999 tokens is longer than the context"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_models_are_loaded(
    call, folder, tmp_path, monkeypatch, text, words, message
):
    monkeypatch.setattr("moe_core.cli.model_loading.load_model", lambda *_: pytest.fail("a model was loaded"))
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    code, out, err = call("eval", "--model", str(folder), "--text", str(path), "--against", str(folder), *words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("content", "why"), [(None, "cannot be read (No such file"), (b"\xff\xfe\x00", "not readable as UTF-8")]
)
def test_a_text_that_is_not_readable(call, folder, tmp_path, content, why):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    code, out, err = call("eval", "--model", str(folder), "--text", str(path), "--device", "cpu")
    assert (code, out) == (2, "")
    assert f"text {path}: {why}" in err


@pytest.mark.error_path
def test_not_a_model(call, folder, sample, tmp_path):
    for words in ((str(tmp_path),), (str(folder), "--against", str(tmp_path))):
        code, out, err = call("eval", "--model", *words, "--text", str(sample), "--device", "cpu")
        assert (code, out) == (2, "")
        assert f"no model at {tmp_path}" in err
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    code, out, err = call(
        "eval", "--model", str(folder), "--text", str(sample), "--against", str(tmp_path), "--device", "cpu"
    )
    assert (code, out) == (1, "")
    assert f"{tmp_path}: no safetensors file; expected model.safetensors" in err


@pytest.mark.error_path
def test_words_that_are_not_known(call, folder, sample):
    for words, message in (
        (("--dtype", "bf61"), "unknown dtype 'bf61'; did you mean 'bf16'?"),
        (("--device", "cuba"), "unknown device type 'cuba'; did you mean 'cuda'?"),
        (("--stride", "0"), "--stride"),
        (("--window", "20", "--stride", "21"), "stride 21 is not in 1..20"),
    ):
        code, out, err = call("eval", "--model", str(folder), "--text", str(sample), *words)
        assert (code, out) == (2, "")
        assert message in err
