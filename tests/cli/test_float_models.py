"""Models of floats that transformers loads for the commands: what does not fit is refused, what may differ is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_qwen

pytest.importorskip("transformers")

from moe_core.cli.model_loading import load_model
from moe_core.errors import SpecError, UnknownNameError, UnsupportedModelError, WeightsError
from moe_core.quantizer.checkpoint import quantize_checkpoint
from tests.integrations.hf_catalogue import decorated_classes

BY_NAME = {entry.name: entry for entry in decorated_classes()}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts"
HIDDEN = 64


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("written")
    write_tiny_qwen(target, hidden_size=HIDDEN, moe_intermediate_size=32, tie_word_embeddings=True)
    return target


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, **changes: Any) -> None:
    """Replace fields of the configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def store(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors; None takes one away."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def expert(number: int, word: str = "down_proj") -> str:
    return f"{EXPERT}.{number}.{word}.weight"


SPOILED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "missing": ({Q_PROJ: None, "model.norm.weight": None}, (f"{Q_PROJ}: missing", "model.norm.weight: missing")),
    "surplus": (
        {"model.layers.0.self_attn.sinks": torch.ones(2)},
        ("model.layers.0.self_attn.sinks: unknown to the model",),
    ),
    "surplus_layer": (
        {"model.layers.2.self_attn.q_proj.weight": torch.ones(32, HIDDEN)},
        ("model.layers.2.self_attn.q_proj.weight: unknown to the model",),
    ),
    "misshapen": ({"model.norm.weight": torch.ones(3)}, (f"model.norm.weight: has shape [3], the model [{HIDDEN}]",)),
    "integers": ({Q_PROJ: torch.ones(32, HIDDEN, dtype=torch.int8)}, (f"{Q_PROJ}: holds int8, the model floats",)),
    "small_floats": (
        {Q_PROJ: torch.ones(32, HIDDEN).to(torch.float8_e4m3fn)},
        (f"{Q_PROJ}: holds float8_e4m3fn, the model floats",),
    ),
    "expert_missing": ({expert(1): None}, (f"{expert(1)}: missing",)),
    "experts_missing": (
        {expert(1): None, expert(3, "up_proj"): None},
        (f"{expert(1)}: missing", f"{expert(3, 'up_proj')}: missing"),
    ),
    "expert_misshapen": ({expert(2): torch.ones(3, 3)}, (f"{expert(2)}: has shape [3, 3], that of expert 0 is",)),
    "expert_of_integers": (
        {expert(2): torch.ones(HIDDEN, 32, dtype=torch.int8)},
        (f"{expert(2)}: holds int8, the model floats",),
    ),
}


@pytest.mark.error_path
@pytest.mark.parametrize("name", SPOILED)
def test_tensors_that_do_not_fit_are_listed(model: Path, name: str) -> None:
    changes, messages = SPOILED[name]
    store(model, changes)
    with pytest.raises(WeightsError, match="nothing was loaded") as refused:
        load_model(model, None, "cpu")
    for message in messages:
        assert f"\n  {message}" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1 + len(messages)


@pytest.mark.error_path
def test_an_expert_under_another_number_does_not_take_the_place_of_one(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    words = ("gate_proj", "up_proj", "down_proj")
    store(
        model,
        {expert(1, word): None for word in words} | {expert(4, word): tensors[expert(1, word)] for word in words},
    )
    with pytest.raises(WeightsError, match=r"experts\.1\.down_proj\.weight: missing"):
        load_model(model, None, "cpu")


@pytest.mark.error_path
@pytest.mark.parametrize("scheme", ["w8a8_int8", "fp8_block128", "mxfp4_w4a16"])
def test_codes_without_their_configuration_are_no_floats(model: Path, tmp_path: Path, scheme: str) -> None:
    quantize_checkpoint(model, tmp_path / "quantized", scheme)
    config = tmp_path / "quantized" / "config.json"
    content = json.loads(config.read_text())
    del content["quantization_config"]
    config.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=r"experts.*(unknown to the model|holds )"):
        load_model(tmp_path / "quantized", None, "cpu")


@pytest.mark.error_path
@pytest.mark.parametrize("command", ["run", "eval", "quantize"])
def test_every_command_refuses_them(call: Any, model: Path, tmp_path: Path, command: str) -> None:
    store(model, {Q_PROJ: None})
    text = tmp_path / "text.txt"
    text.write_text("a text of some tokens " * 4, encoding="utf-8")
    words = {
        "run": ("--model", str(model), "--prompt", "a", "--device", "cpu"),
        "eval": ("--model", str(model), "--text", str(text), "--device", "cpu"),
        "quantize": (
            "--model",
            str(model),
            "--output",
            str(tmp_path / "out"),
            "--scheme",
            "nvfp4",
            "--calibrate",
            str(text),
        ),
    }
    code, out, err = call(command, *words[command])
    assert (code, out) == (1, "")
    assert f"nothing was loaded:\n  {Q_PROJ}: missing" in err
    assert not (tmp_path / "out").exists()


ACCEPTED: dict[str, dict[str, torch.Tensor]] = {
    "as_written": {},
    "tied_head_is_stored": {"lm_head.weight": torch.ones(256, HIDDEN)},
    "buffers_of_other_versions": {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.rotary_emb.inv_freq": torch.ones(8),
    },
    "another_float": {Q_PROJ: torch.ones(32, HIDDEN, dtype=torch.float64)},
    "drafts_by_name": {"mtp.layers.0.norm.weight": torch.ones(HIDDEN, dtype=torch.int8)},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_may_differ_is_not_refused(model: Path, name: str) -> None:
    store(model, ACCEPTED[name])
    assert load_model(model, None, "cpu").config.hidden_size == HIDDEN


#: Families whose tensors are renamed, stacked, turned or tables of integers, and those with ignored draft layers.
FAMILIES = (
    "DeepseekV3Experts",
    "DeepseekV4Experts",
    "GptOssExperts",
    "GraniteMoeExperts",
    "KimiLinearExperts",
    "MixtralExperts",
    "NemotronHExperts",
    "PhimoeExperts",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_saves_is_loaded(name: str, tmp_path: Path) -> None:
    saved: Any = BY_NAME[name].build_model(seed=0)
    saved.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, None, "cpu")
    for key, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor)


def test_declared_draft_layers_are_left_in_the_file(model: Path) -> None:
    drafts = {
        "model.layers.2.eh_proj.weight": torch.ones(3, dtype=torch.int8),
        "model.layers.2.mlp.experts.0.down_proj.weight": torch.ones(HIDDEN, 32),
    }
    store(model, drafts)
    with pytest.raises(WeightsError, match=r"layers\.2\.eh_proj\.weight: unknown"):
        load_model(model, None, "cpu")
    edit(model, num_nextn_predict_layers=1)
    assert load_model(model, None, "cpu").config.num_hidden_layers == 2
    store(model, {"model.layers.3.eh_proj.weight": torch.ones(3)})
    with pytest.raises(WeightsError, match=r"layers\.3\.eh_proj\.weight: unknown"):
        load_model(model, None, "cpu")


@pytest.mark.error_path
def test_tables_of_integers_belong_to_some_models(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

    built = Qwen3MoeAttention.__init__

    def with_table(self: Any, *arguments: Any, **more: Any) -> None:
        built(self, *arguments, **more)
        self.register_buffer("table", torch.zeros(4, dtype=torch.int64))

    monkeypatch.setattr(Qwen3MoeAttention, "__init__", with_table)
    name = "model.layers.{}.self_attn.table"
    store(model, {name.format(layer): torch.arange(4) for layer in range(2)})
    loaded = load_model(model, None, "cpu")
    assert loaded.get_buffer(name.format(1)).tolist() == [0, 1, 2, 3]


@pytest.mark.error_path
@pytest.mark.parametrize("command", ["run", "eval"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: _truncate(folder / "model.safetensors"), "not a whole safetensors file"),
        (lambda folder: edit(folder, hidden_size="64"), "cannot be loaded: StrictDataclassFieldValidationError"),
        (lambda folder: edit(folder, num_hidden_layers=-1), "error: "),
        (lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0"}'), "tokenizer in "),
        (lambda folder: (folder / "tokenizer.json").write_text("no JSON"), "tokenizer in "),
        (lambda folder: edit(folder, num_nextn_predict_layers="2"), "number of draft layers"),
    ],
)
def test_what_cannot_be_loaded(call: Any, model: Path, tmp_path: Path, command: str, spoil: Any, message: str) -> None:
    spoil(model)
    text = tmp_path / "text.txt"
    text.write_text("a text of some tokens", encoding="utf-8")
    words = {"run": ("--model", str(model), "--prompt", "a"), "eval": ("--model", str(model), "--text", str(text))}
    code, out, err = call(command, *words[command], "--device", "cpu")
    assert code in (1, 2)
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def _truncate(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


@pytest.mark.error_path
def test_the_cause_is_kept(model: Path) -> None:
    edit(model, hidden_size="64")
    with pytest.raises(UnsupportedModelError) as refused:
        load_model(model, None, "cpu")
    assert type(refused.value.__cause__).__name__ == "StrictDataclassFieldValidationError"


@pytest.mark.error_path
def test_arguments(model: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown dtype 'fp8'"):
        load_model(model, "fp8", "cpu")
    for device in ("foo", "cpu:x", "cpu:3", "xpu"):
        with pytest.raises(SpecError, match="device"):
            load_model(model, None, device)
