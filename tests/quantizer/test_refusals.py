"""What is refused, and that nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import MODULE, expert_weights, fused, one_by_one, write_checkpoint

from moe_core.errors import MoeCoreError, SpecError, UnknownNameError, WeightsError
from moe_core.quantizer import checkpoint
from moe_core.quantizer.checkpoint import quantize_checkpoint, require_quantizable
from moe_core.quantizer.input_amax import ExpertInputs, ModelInputs
from moe_core.quantizer.output import new_folder, stale_folders

pytestmark = pytest.mark.error_path


def _refused(source: Path, out: Path, error: type[Exception], match: str, scheme: str = "w8a8_int8") -> None:
    with pytest.raises(error, match=match):
        quantize_checkpoint(source, out, scheme)
    assert {path for path in out.parent.iterdir() if path.name.startswith(("out", ".out"))} == set()


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda t: t.pop(f"{MODULE}.1.up_proj.weight"), "experts.1: has gate, down; expected"),
        (lambda t: [t.pop(name) for name in list(t) if f"{MODULE}.1." in name], r"experts \[1\] are missing"),
        (lambda t: t.update({f"{MODULE}.0.gate_proj.bias": torch.zeros(4)}), "gate_proj.bias .* not understood"),
        (lambda t: t.update({f"{MODULE}.0.up_proj.weight": t[f"{MODULE}.0.down_proj.weight"].clone()}), "output x in"),
        (
            lambda t: t.update({f"{MODULE}.0.up_proj.weight": torch.zeros(4, 4, dtype=torch.int8)}),
            "holds torch.int8, expected",
        ),
        (lambda t: t[f"{MODULE}.2.up_proj.weight"].fill_(torch.nan), "experts.2.up_proj: .* infinities or NaN"),
        (lambda t: t[f"{MODULE}.2.up_proj.weight"][0].fill_(torch.inf), "experts.2.up_proj: .* infinities or NaN"),
    ],
    ids=["incomplete", "gap", "bias", "shape", "integers", "nan", "inf"],
)
def test_experts_that_are_not_understood(spoil: Callable[..., object], match: str, tmp_path: Path) -> None:
    tensors = one_by_one(expert_weights())
    spoil(tensors)
    _refused(write_checkpoint(tmp_path / "source", tensors), tmp_path / "out", WeightsError, match)


def test_input_x_output(tmp_path: Path) -> None:
    turned = {name: tensor.mT.contiguous() for name, tensor in fused(expert_weights()).items()}
    _refused(write_checkpoint(tmp_path / "source", turned), tmp_path / "out", WeightsError, "output x input")


def test_rows_by_turns(tmp_path: Path) -> None:
    tensors = fused(expert_weights())
    tensors[f"{MODULE}.w13_weight"] = tensors.pop(f"{MODULE}.gate_up_proj")
    tensors[f"{MODULE}.w2_weight"] = tensors.pop(f"{MODULE}.down_proj")
    source = write_checkpoint(tmp_path / "source", tensors)
    _refused(source, tmp_path / "out", WeightsError, r"w13_weight: its rows of gate and up lie by turns")


def test_input_x_output_cannot_hide_behind_equal_sizes(tmp_path: Path) -> None:
    # 2I = H: one of the two tensors is square, the other shows how both lie.
    turned = {name: t.mT.contiguous() for name, t in fused(expert_weights(hidden=192, inner=96)).items()}
    _refused(write_checkpoint(tmp_path / "source", turned), tmp_path / "out", WeightsError, "output x input")


def test_no_experts(tmp_path: Path) -> None:
    _refused(write_checkpoint(tmp_path / "source", {}), tmp_path / "out", SpecError, "no experts in this checkpoint")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_quantized_already_by_its_configuration(nested: bool, name: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()))
    says = {name: {"quant_method": "awq"}}
    (source / "config.json").write_text(json.dumps({"text_config": says} if nested else says))
    _refused(source, tmp_path / "out", SpecError, "quantized already .*awq")


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quant_model_description_w8a8.json"])
def test_quantized_already_by_a_file(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()))
    (source / name).write_text("{}")
    _refused(source, tmp_path / "out", SpecError, f"quantized already .*{name}")


@pytest.mark.parametrize(
    ("scheme", "hidden", "inner", "match"),
    [
        ("w4a8_int8", 160, 80, None),
        ("w4a8_int8", 160, 81, "gate: 81 outputs, expected a multiple of 2"),
        ("w4a8_int8", 160, 88, "down: 88 inputs, expected a multiple of 16"),
        ("nvfp4", 168, 96, "gate: 168 inputs, expected a multiple of 16"),
        ("mxfp4_w4a16", 160, 80, "down: 80 inputs, expected a multiple of 32"),
        ("w8a8_int8", 33, 17, None),
        ("w4a4_int4", 33, 17, None),
        ("fp8_block128", 33, 17, None),
    ],
)
def test_sizes(scheme: str, hidden: int, inner: int, match: str | None, tmp_path: Path) -> None:
    weights = expert_weights(hidden=hidden, inner=inner)
    source = write_checkpoint(tmp_path / "source", one_by_one(weights))
    if match is None:
        require_quantizable(source, tmp_path / "out", scheme)
        return
    with pytest.raises(SpecError, match=match):
        require_quantizable(source, tmp_path / "out", scheme)


@pytest.mark.parametrize("make", [lambda out: out.write_text("x"), lambda out: (out / "sub").mkdir(parents=True)])
def test_out_is_taken(make: Callable[[Path], object], tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()))
    make(tmp_path / "out")
    for call in (quantize_checkpoint, require_quantizable):
        with pytest.raises(SpecError, match="exists and is not an empty folder"):
            call(source, tmp_path / "out", "mxfp4_w4a16")  # type: ignore[operator]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    _refused(tmp_path / "source", tmp_path / "out", WeightsError, "no safetensors file; expected model.safetensors")


def test_a_broken_weight_file(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()))
    (source / "model.safetensors").write_bytes(b"no safetensors")
    _refused(source, tmp_path / "out", WeightsError, "model.safetensors: not a whole safetensors file")


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": 3}'])
def test_a_broken_index(content: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()), files=2)
    (source / "model.safetensors.index.json").write_text(content)
    _refused(source, tmp_path / "out", WeightsError, "not readable as an index")


def test_files_that_differ_from_the_index(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()), files=2)
    index = source / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["model.lost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(listed))
    _refused(source, tmp_path / "out", WeightsError, "(?s)disagree.*model.lost.weight: in the index, not in the file")
    listed["weight_map"]["model.lost.weight"] = "model-00003-of-00002.safetensors"
    index.write_text(json.dumps(listed))
    _refused(source, tmp_path / "out", WeightsError, "shards that are not on disk: model-00003-of-00002")


def test_a_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()), files=2)
    index = source / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"] = {n: f for n, f in listed["weight_map"].items() if f == "model-00001-of-00002.safetensors"}
    index.write_text(json.dumps(listed))
    _refused(source, tmp_path / "out", WeightsError, "the index does not name: model-00002-of-00002")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_json", full)
    _refused(source, tmp_path / "out", MoeCoreError, "nothing was left there: .*No space left")


def test_words(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()))
    with pytest.raises(UnknownNameError, match="did you mean 'mxfp4'"):
        quantize_checkpoint(source, tmp_path / "out", "mxfp5")
    with pytest.raises(SpecError, match="'w4a8_int8' is written for modelslim, not for 'modelopt'"):
        quantize_checkpoint(source, tmp_path / "out", "w4a8_int8", ecosystem="modelopt")
    with pytest.raises(SpecError, match="needs `inputs`"):
        quantize_checkpoint(source, tmp_path / "out", "nvfp4")
    with pytest.raises(SpecError, match="takes no `inputs`"):
        quantize_checkpoint(source, tmp_path / "out", "mxfp4_w4a16", inputs=ModelInputs(default=1.0))


def test_inputs_that_were_not_measured(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()))
    silent = ExpertInputs(first=(0.0, 0.0, 0.0), second=(0.0, 0.0, 0.0))
    for layers in ({}, {0: silent}, {1: silent}):
        with pytest.raises(SpecError, match=rf"{MODULE}.0: no input was seen"):
            quantize_checkpoint(source, tmp_path / "out", "nvfp4", inputs=ModelInputs(layers=layers))
    assert not (tmp_path / "out").exists()
    for default in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(SpecError, match="finite number > 0"):
            ModelInputs(default=default)


@pytest.mark.parametrize("made", ["", "new", "new/deeper"])
def test_folders_above_vanish_with_it(made: str, tmp_path: Path) -> None:
    tensors = one_by_one(expert_weights())
    # Found when half of the experts are written.
    tensors[f"{MODULE}.2.up_proj.weight"].fill_(torch.nan)
    source = write_checkpoint(tmp_path / "source", tensors)
    (tmp_path / "there").mkdir()
    with pytest.raises(WeightsError, match="infinities or NaN"):
        quantize_checkpoint(source, tmp_path / "there" / made / "out", "w8a8_int8")
    assert not any((tmp_path / "there").iterdir())


def test_folders_above_that_others_use_stay(tmp_path: Path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "new" / "deeper" / "out"):
            (tmp_path / "new" / "theirs").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["theirs"]


def test_what_killed_runs_left(tmp_path: Path) -> None:
    assert stale_folders(tmp_path / "none" / "out") == ()
    for name in (".out.abc.partial", ".other.abc.partial", ".out.json", "out"):
        (tmp_path / name).mkdir()
    assert stale_folders(tmp_path / "out") == (tmp_path / ".out.abc.partial",)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_outside_the_experts(dtype: torch.dtype, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors = {**one_by_one(expert_weights()), name: torch.ones(4, 4).to(dtype)}
    source = write_checkpoint(tmp_path / "source", tensors)
    _refused(source, tmp_path / "out", WeightsError, rf"nothing was written:\n  {name}: {dtype}$")


def test_tables_of_integers_are_copied(tmp_path: Path) -> None:
    tensors = {**one_by_one(expert_weights()), "model.layers.1.mlp.gate.table": torch.arange(5)}
    quantize_checkpoint(write_checkpoint(tmp_path / "source", tensors), tmp_path / "out", "w8a8_int8")
    copied = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.gate.table"]
    assert copied.tolist() == [0, 1, 2, 3, 4]
