"""`moe-core run` on a tiny random model without tokenizer."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import types

import pytest
import torch

from moe_core.cli import generation, model_loading
from moe_core.cli.text_codec import ByteCodec, load_codec
from moe_core.environment import PRESETS
from moe_core.errors import SpecError
from moe_core.manager import default_manager
from moe_core.planner import make_plan
from moe_core.request import LayerRequest

transformers = pytest.importorskip("transformers")

REQUEST = LayerRequest(num_experts=4, top_k=2, hidden_size=32, intermediate_size=16, dtype="fp32")


@pytest.fixture
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def _wrong_on_purpose(module, hidden_states, top_k_index, top_k_weights):
    return hidden_states * 0.5


@pytest.fixture
def stub_bridge(monkeypatch):
    """A bridge whose experts compute something else, so that the command must notice the difference from eager."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    calls = []
    plan, decision = make_plan(default_manager(), REQUEST, PRESETS["cpu"])

    def prepare(model, **pins):
        calls.append(pins)
        names = [name for name, module in model.named_modules() if name.endswith("mlp.experts")]
        return {name: types.SimpleNamespace(plan=plan, decision=decision) for name in names}

    # Not through its `register`, which nothing undoes.
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "moe_core", _wrong_on_purpose)
    monkeypatch.setattr(model_loading, "register", lambda: None)
    monkeypatch.setattr(model_loading, "prepare", prepare)
    return calls


def _figures(out):
    return " ".join(out[out.index("figures") :].split())


def test_run_prints_plans_text_and_figures(call, folder, stub_bridge, tmp_path):
    sample = tmp_path / "sample.txt"
    sample.write_text("é" * 200, encoding="utf-8")
    words = ("run", "--model", str(folder), "--prompt", "Hello", "--device", "cpu", "--text", str(sample))
    code, out, err = call(*words, "--max-new-tokens", "5", "--runner-backend", "torch")
    assert code == 0
    assert stub_bridge == [{"runner_backend": "torch", "a2a_backend": None}]
    assert "plan of layers 0, 2\n" in out
    assert "torch:none.standard + torch:torch.standard" in out
    assert "\nHello" in out[out.index("text") :]
    figures = _figures(out)
    assert "UTF-8 bytes" in figures
    assert "(5 tokens)" in figures
    assert "(4 tokens)" in figures
    assert re.search(r"perplexity \d+\.\d+ per byte, \d+\.\d+ per token \(398 tokens of", figures)
    for stage in ("loading", "eager reference", "preparing experts", "warm-up", "generating", "perplexity"):
        assert f"{stage}: " in err
    assert "Loading weights" not in err


def test_a_wrong_result_shows_as_difference_from_eager(call, folder, stub_bridge):
    code, out, _ = call("run", "--model", str(folder), "--prompt", "Hello", "--device", "cpu", "--max-new-tokens", "1")
    largest = re.search(r"largest difference from eager ([\d.e+-]+)", _figures(out))
    assert code == 0
    assert float(largest[1]) > 1e-3
    assert "no token decoded" in _figures(out)


@pytest.mark.error_path
def test_nan_is_no_answer(call, folder, stub_bridge, monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def spoiled(module, hidden_states, top_k_index, top_k_weights):
        return hidden_states * torch.nan

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "moe_core", spoiled)
    code, out, err = call("run", "--model", str(folder), "--prompt", "Hello", "--device", "cpu")
    assert (code, "figures" in out) == (1, False)
    assert "error: the model answers the prompt with NaN: " in err


def test_no_comparison_when_it_is_not_wanted(call, folder, stub_bridge):
    words = ("run", "--model", str(folder), "--prompt", "Hello", "--device", "cpu", "--no-compare-eager")
    code, out, err = call(*words, "--max-new-tokens", "2")
    assert code == 0
    assert "difference" not in out
    assert "eager" not in err


def test_the_real_bridge_agrees_with_eager(call, folder):
    pytest.importorskip("moe_core.integrations.transformers")
    code, out, _ = call("run", "--model", str(folder), "--prompt", "Hello there", "--device", "cpu")
    figures = _figures(out)
    assert code == 0
    # fp32 sums of 16 to 32 products in another order, through three layers: far below 1e-4 at logits of order 1.
    assert float(re.search(r"largest difference from eager ([\d.e+-]+)", figures)[1]) < 1e-4
    assert "same top token at 11 of 11 positions" in figures


@pytest.mark.error_path
def test_a_prompt_that_is_no_text(call, folder):
    code, out, err = call("run", "--model", str(folder), "--prompt", "a\udcff")
    assert (code, out) == (2, "")
    assert err == "error: the prompt is not readable as UTF-8; in a locale of another encoding set PYTHONUTF8=1\n"


def test_transformers_is_missing(call, folder, monkeypatch):
    real = importlib.import_module

    def without(name, package=None):
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    code, out, err = call("run", "--model", str(folder), "--prompt", "a")
    assert (code, out) == (1, "")
    assert "error: models are loaded with transformers, which cannot be imported here" in err
    assert "pip install 'moe-core[transformers]'" in err


def test_a_folder_without_weights(call, folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    code, _, err = call("run", "--model", str(tmp_path), "--prompt", "a", "--device", "cpu")
    assert code == 1
    assert f"error: {tmp_path}: no safetensors file; expected model.safetensors" in err


def test_a_dense_model(call, tmp_path):
    pytest.importorskip("moe_core.integrations.transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    code, _, err = call("run", "--model", str(tmp_path), "--prompt", "a", "--device", "cpu")
    assert code == 1
    assert "LlamaForCausalLM" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--prompt", ""), "the prompt is empty"), (("--prompt", "a", "--text", "/no/file"), "/no/file: cannot be read")],
)
def test_bad_texts(call, folder, monkeypatch, words, message):
    monkeypatch.setattr(model_loading, "load_model", lambda *_: pytest.fail("the model was loaded"))
    code, _, err = call("run", "--model", str(folder), "--device", "cpu", *words)
    assert code == 2
    assert message in err


def test_greedy_generation_is_what_transformers_generates(model):
    ids = list(b"The quick brown fox")
    own = generation.generate(model, ids, 8)
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    assert list(own.ids) == theirs[0, len(ids) :].tolist()
    assert own.prefill_tokens == len(ids)


def test_generation_stops_at_an_end_token(model):
    ids = list(b"The quick brown fox")
    first, second, *_ = generation.generate(model, ids, 8).ids
    model.generation_config.eos_token_id = [second]
    assert generation.generate(model, ids, 8).ids == (first, second)


def test_bytes_as_tokens(folder):
    codec = load_codec(folder, 256)
    assert codec.encode("aé") == [97, 0xC3, 0xA9]
    assert ByteCodec().decode([97, 0xC3, 300, 98]) == "a��b"
    with pytest.raises(SpecError, match="too few for bytes"):
        load_codec(folder, 100)


def test_a_tokenizer_is_described_by_what_a_user_knows_of_it(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    assert load_codec(tmp_path, 2).name == "tokenizer of 2 tokens"


@pytest.mark.error_path
@pytest.mark.parametrize("option", ["--runner-backend", "--a2a-backend"])
def test_unknown_pins_are_refused_before_anything_is_loaded(call, folder, tmp_path, option):
    kind = option.strip("-").replace("-", " ")
    (tmp_path / "a.txt").write_text("a")
    for words in (
        ("run", "--model", str(folder), "--prompt", "a"),
        ("eval", "--model", str(folder), "--text", str(tmp_path / "a.txt")),
    ):
        code, out, err = call(*words, option, "nope")
        assert (code, out) == (2, "")
        assert err.startswith(f"error: unknown {kind} 'nope'")


@pytest.mark.error_path
@pytest.mark.parametrize("dtype", [(), ("--dtype", "bf16")])
@pytest.mark.parametrize("pin", [("--runner-backend", "triton"), ("--a2a-backend", "torch_alltoall")])
def test_pins_that_do_not_fit_the_model_are_refused_before_it_is_loaded(call, folder, monkeypatch, pin, dtype):
    monkeypatch.setattr(model_loading, "load_model", lambda *_: pytest.fail("the model was loaded"))
    code, out, err = call("run", "--model", str(folder), "--prompt", "a", "--device", "cpu", *pin, *dtype)
    assert (code, out) == (1, "")
    assert "\nerror: no backend combination fits this layer on cpu" in err
    assert "loading" not in err
    assert f"asked: {'bf16' if dtype else 'fp32'}, " in err


def test_a_model_whose_dtype_only_its_weights_tell_is_not_refused_early(call, folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("dtype") == "float32"
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("run", "--model", str(tmp_path), "--prompt", "a", "--device", "cpu", "--runner-backend", "torch")
    code, out, _ = call(*words, "--max-new-tokens", "1")
    assert code == 0
    assert "chosen by pin (runner torch), then rank" in " ".join(out.split())


@pytest.mark.error_path
def test_no_hint_is_an_option_that_run_does_not_have(call, folder):
    code, _, err = call("run", "--model", str(folder), "--prompt", "a", "--device", "cpu", "--runner-backend", "triton")
    assert code == 1
    assert "leave the pins out" in err
    assert "fallback" not in err
    assert err.endswith("every reason: moe-core resolve --model DIR --explain -v\n")


@pytest.mark.parametrize(("most", "is_told"), [(9, False), (10, True)])
def test_more_tokens_than_a_model_was_made_for_are_a_warning(call, folder, stub_bridge, tmp_path, most, is_told):
    short = shutil.copytree(folder, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10}))
    words = ("run", "--model", str(short), "--prompt", "a", "--device", "cpu", "--max-new-tokens", str(most))
    code, _, err = call(*words)
    told = f"warning: the prompt has 1 token, with --max-new-tokens 10 that may become 11: {short} was made for 10\n"
    assert (code, told in err) == (0, is_told)
