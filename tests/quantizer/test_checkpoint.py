"""Whole checkpoints: written, read again by independent float64 readers, and compared with direct quantization."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_moe import Q, nvfp4_global, quant_fp8_block, quant_int, quant_mxfp4, quant_nvfp4
from tiny_checkpoints import (
    EXPERTS,
    MIXTRAL_NAMES,
    MODULE,
    NAMES,
    READERS,
    Tensors,
    expert_weights,
    fused,
    of_projection,
    one_by_one,
    other_tensors,
    read_tensors,
    write_checkpoint,
)

from moe_core.quant import (
    FP8_BLOCK128,
    MXFP4_W4A16,
    NVFP4,
    SCHEMES,
    W4A4_INT4,
    W4A8_INT8,
    W8A8_INT8,
    QuantScheme,
)
from moe_core.quantizer.checkpoint import quantize_checkpoint
from moe_core.quantizer.input_amax import ExpertInputs, ModelInputs
from moe_core.quantizer.layouts import LAYOUTS, find_layout
from moe_core.quantizer.words import WRITABLE, WRITTEN
from moe_core.weights.names import experts_modules

INPUTS = ModelInputs(layers={1: ExpertInputs(first=(3.0, 4.5, 0.0), second=(2.0, 0.0, 8.0))})
PAIRS = [(scheme, ecosystem) for scheme, names in WRITABLE.items() for ecosystem in names]
each_layout = pytest.mark.parametrize(("scheme", "ecosystem"), PAIRS, ids=["-".join(pair) for pair in PAIRS])


def _direct(scheme: str, ecosystem: str, weights: dict[str, torch.Tensor], half: str, expert: int) -> Q:
    weight = weights[half][expert]
    if scheme == "nvfp4":
        shared = weight if half == "down" else torch.cat([weights["gate"][expert], weights["up"][expert]])
        divisor = (2688 / shared.double().abs().amax()).float()
        return quant_nvfp4(weight, nvfp4_global(shared) if ecosystem == "modelopt" else 1 / divisor.double())
    direct: dict[str, Callable[[torch.Tensor], Q]] = {
        "fp8_block128": quant_fp8_block,
        "w8a8_int8": lambda w: quant_int(w, 8),
        "w4a8_int8": lambda w: quant_int(w, 4),
        "w4a4_int4": lambda w: quant_int(w, 4),
        "mxfp4_w4a16": quant_mxfp4,
    }
    return direct[scheme](weight)


def _inputs(scheme: str) -> ModelInputs | None:
    return INPUTS if scheme == "nvfp4" else None


def test_every_name_is_of_the_scheme_that_its_layout_stores() -> None:
    pairs = {(scheme, ecosystem) for ecosystem, schemes in LAYOUTS.items() for scheme in schemes}
    assert pairs == set(PAIRS) == set(READERS)
    for ecosystem, layouts in LAYOUTS.items():
        assert tuple(layout.stored for layout in layouts.values()) == WRITTEN[ecosystem]
        for name, layout in layouts.items():
            assert SCHEMES[name] == layout.stored.scheme


@pytest.mark.parametrize(
    ("word", "stored"),
    [
        ("fp8_block", FP8_BLOCK128),
        ("w8a8_int8", W8A8_INT8),
        ("w4a8", W4A8_INT8),
        ("w4a4", W4A4_INT4),
        ("nvfp4", NVFP4),
        ("mxfp4", MXFP4_W4A16),
    ],
)
def test_short_words_and_names_write_the_same(word: str, stored: QuantScheme) -> None:
    assert find_layout(word).stored.scheme == stored
    assert find_layout(stored.label) is find_layout(word)


@each_layout
@pytest.mark.parametrize("form", ["one by one", "mixtral", "fused"])
def test_read_again_it_is_the_direct_quantization(scheme: str, ecosystem: str, form: str, tmp_path: Path) -> None:
    weights = expert_weights()
    names = MIXTRAL_NAMES if form == "mixtral" else NAMES
    experts = fused(weights) if form == "fused" else one_by_one(weights, names)
    source = write_checkpoint(tmp_path / "source", experts, files=1 if form == "fused" else 3)
    quantize_checkpoint(source, tmp_path / "out", scheme, ecosystem=ecosystem, inputs=_inputs(scheme))
    tensors = read_tensors(tmp_path / "out")
    for half, weight in weights.items():
        for expert in range(EXPERTS):
            stored = of_projection(tensors, f"{MODULE}.{expert}.{names[half]}")
            got, want = READERS[scheme, ecosystem](stored), _direct(scheme, ecosystem, weights, half, expert).deq
            assert got.shape == weight[expert].shape
            # A division by the divisor and a multiplication by its inverse differ in the last bits of float64.
            exact = (scheme, ecosystem) != ("nvfp4", "compressed_tensors")
            torch.testing.assert_close(got, want, rtol=0 if exact else 1e-14, atol=0)


@pytest.mark.parametrize("module", ["model.layers.1.block_sparse_moe", "model.layers.1.mlp"])
def test_experts_of_families_with_names_of_their_own(module: str, tmp_path: Path) -> None:
    weights = fused(expert_weights())
    names = {f"{MODULE}.gate_up_proj": "input_linear", f"{MODULE}.down_proj": "output_linear"}
    linear = {f"{module}.{names[name]}.weight": tensor for name, tensor in weights.items()}
    quantize_checkpoint(write_checkpoint(tmp_path / "source", linear), tmp_path / "out", "w8a8_int8")
    quantize_checkpoint(write_checkpoint(tmp_path / "usual", weights), tmp_path / "expected", "w8a8_int8")
    got, want = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "expected")
    assert got.keys() == {name.replace(MODULE, module) for name in want}
    assert all(torch.equal(got[name.replace(MODULE, module)], tensor) for name, tensor in want.items())
    assert experts_modules(got) == (module,)


def test_weight_files_and_indices_of_other_names(tmp_path: Path) -> None:
    experts = one_by_one(expert_weights())
    single = write_checkpoint(tmp_path / "single", experts)
    (single / "model.safetensors").rename(single / "weights.safetensors")
    sharded = write_checkpoint(tmp_path / "sharded", experts, files=2)
    (sharded / "model.safetensors.index.json").rename(sharded / "other.safetensors.index.json")
    for source in (single, sharded):
        quantize_checkpoint(source, tmp_path / "out" / source.name, "w8a8_int8")
    one, other = (read_tensors(tmp_path / "out" / name) for name in ("single", "sharded"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_what_lies_in_the_folder_besides(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()))
    for name in ("modeling.py", "LICENSE", "pytorch_model.bin", "q8.gguf", "pytorch_model.bin.index.json"):
        (source / name).write_text(name)
    (source / "onnx").mkdir()
    quantize_checkpoint(source, tmp_path / "out", "w8a8_int8")
    copied = {"LICENSE", "modeling.py", "tokenizer.json"}
    made = {"config.json", "model.safetensors", "README.md"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == copied | made


@each_layout
def test_the_card_is_of_the_model_that_was_written(scheme: str, ecosystem: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a_model", one_by_one(expert_weights()))
    inputs = _inputs(scheme)
    written = quantize_checkpoint(source, tmp_path / "out", scheme, ecosystem=ecosystem, inputs=inputs)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith(f"# a_model, experts in {scheme}\n")
    size = f"| {written.num_experts} experts | {written.expert_bytes_before:,} | {written.expert_bytes_after:,} |"
    assert size in card
    assert f"--scheme {scheme} --ecosystem {ecosystem}" in card
    assert ("--calibrate FILE" in card) == bool(inputs and inputs.layers)
    assert str(tmp_path) not in card
    assert "BASE_README" not in card


def test_the_card_of_the_model_before_lies_beside_the_new_one(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a_model", one_by_one(expert_weights()))
    (source / "README.md").write_text("perplexity 3")
    quantize_checkpoint(source, tmp_path / "out", "w8a8_int8")
    assert (tmp_path / "out" / "BASE_README.md").read_text() == "perplexity 3"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "perplexity 3" not in card
    assert "[BASE_README.md](BASE_README.md)" in card


def test_cards_of_several_models_are_told_apart(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a_model", one_by_one(expert_weights()))
    before = "Distilled, see [the base](BASE_README.md), [中文](./README_zh.md) or [a page](https://host/README_zh.md)."
    cards = {"README.md": before, "BASE_README.md": "the base", "README_zh.md": "zh", "readme.txt": "notes"}
    cards["README_DATABASE_v2.md"] = "data"
    for name, text in cards.items():
        (source / name).write_text(text, encoding="utf-8")
    (source / "readme_reader.py").write_text("")
    out = tmp_path / "out"
    quantize_checkpoint(source, out, "w8a8_int8")
    assert (out / "readme_reader.py").exists()
    found = {path.name: path.read_text(encoding="utf-8") for path in out.iterdir() if path.suffix in (".md", ".txt")}
    card = found.pop("README.md")
    after = before.replace("(BASE_", "(BASE_BASE_").replace("./README", "./BASE_README")
    assert found == {
        "BASE_README.md": after,
        "BASE_BASE_README.md": "the base",
        "BASE_README_DATABASE_v2.md": "data",
        "BASE_README_zh.md": "zh",
        "BASE_readme.txt": "notes",
    }
    assert "[BASE_README.md](BASE_README.md), [BASE_README_DATABASE_v2.md](BASE_README_DATABASE_v2.md), " in card
    assert "[BASE_README_zh.md](BASE_README_zh.md), [BASE_readme.txt]" in card
    assert "BASE_BASE" not in card
    # That of the model before the one that was quantized, alone.
    (source / "README.md").unlink()
    quantize_checkpoint(source, tmp_path / "again", "w8a8_int8")
    assert not (tmp_path / "again" / "BASE_README.md").exists()


@each_layout
def test_the_rest_is_copied(scheme: str, ecosystem: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", fused(expert_weights()))
    out = tmp_path / "out"
    written = quantize_checkpoint(source, out, scheme, ecosystem=ecosystem, inputs=_inputs(scheme))
    tensors = read_tensors(out)
    for name, tensor in other_tensors().items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], tensor)
    assert not any(name.startswith(MODULE) and not name[len(MODULE) + 1].isdigit() for name in tensors)
    assert (out / "tokenizer.json").read_text() == "{}"
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config", None) is not None or ecosystem == "modelslim"
    assert config == json.loads((source / "config.json").read_text())
    assert written.stored == LAYOUTS[ecosystem][scheme].stored
    assert written.num_experts == EXPERTS
    kept = sum(tensor.nbytes for tensor in other_tensors().values())
    assert written.kept_bytes == kept
    assert written.expert_bytes_before == sum(weight.nbytes for weight in expert_weights().values())
    assert written.expert_bytes_after == sum(tensor.nbytes for tensor in tensors.values()) - kept


def test_names_of_what_stays_unquantized(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", fused(expert_weights()))
    stays = [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp.gate_proj",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.shared_experts.up_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    configs = {}
    for scheme, ecosystem in PAIRS:
        out = tmp_path / f"{scheme}-{ecosystem}"
        quantize_checkpoint(source, out, scheme, ecosystem=ecosystem, inputs=_inputs(scheme))
        configs[scheme, ecosystem] = json.loads((out / "config.json").read_text()).get("quantization_config")
    fp8 = configs["fp8_block128", "transformers"]
    assert fp8["modules_to_not_convert"] == stays
    assert (fp8["quant_method"], fp8["weight_block_size"], fp8["activation_scheme"]) == ("fp8", [128, 128], "dynamic")
    assert configs["nvfp4", "modelopt"]["ignore"] == configs["mxfp4_w4a16", "compressed_tensors"]["ignore"] == stays
    legacy = json.loads((tmp_path / "nvfp4-modelopt" / "hf_quant_config.json").read_text())["quantization"]
    assert legacy == {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": stays}
    types = json.loads((tmp_path / "w4a8_int8-modelslim" / "quant_model_description.json").read_text())
    tensors = read_tensors(tmp_path / "w4a8_int8-modelslim")
    assert {name: types[name] for name in tensors} == {
        name: "W4A8_DYNAMIC" if name.startswith(MODULE) else "FLOAT" for name in tensors
    }


def test_nvfp4_scales(tmp_path: Path) -> None:
    weights = expert_weights()
    source = write_checkpoint(tmp_path / "source", fused(weights))
    for ecosystem in WRITABLE["nvfp4"]:
        quantize_checkpoint(source, tmp_path / ecosystem, "nvfp4", ecosystem=ecosystem, inputs=INPUTS)
    modelopt, other = (read_tensors(tmp_path / ecosystem) for ecosystem in WRITABLE["nvfp4"])
    # An expert that saw no token takes the largest of its layer.
    amax = {"gate": (3.0, 4.5, 4.5), "up": (3.0, 4.5, 4.5), "down": (2.0, 8.0, 8.0)}
    for half in NAMES:
        for expert in range(EXPERTS):
            name = f"{MODULE}.{expert}.{NAMES[half]}"
            largest = torch.stack([weights[r][expert].abs().max() for r in ("gate", "up", "down")]).double()
            weight_amax = largest[2] if half == "down" else largest[:2].max()
            assert modelopt[f"{name}.weight_scale_2"].shape == modelopt[f"{name}.input_scale"].shape == ()
            assert modelopt[f"{name}.weight_scale_2"] == (weight_amax / 2688).float()
            assert modelopt[f"{name}.input_scale"] == torch.tensor(amax[half][expert]).double().div(2688).float()
            assert other[f"{name}.weight_global_scale"].tolist() == [(2688 / weight_amax).float()]
            assert other[f"{name}.input_global_scale"].tolist() == [torch.tensor(2688 / amax[half][expert]).item()]


def test_scale_bias_of_w4a8(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", fused(expert_weights()))
    quantize_checkpoint(source, tmp_path / "out", "w4a8_int8")
    tensors = read_tensors(tmp_path / "out")
    for half in NAMES:
        stored = of_projection(tensors, f"{MODULE}.0.{NAMES[half]}")
        values = READERS["w4a8_int8", "modelslim"](stored)
        parts = 16 if half == "down" else 1
        want = 8 * values.view(len(values), parts, -1).sum(-1)
        assert stored["scale_bias"].shape == (len(values), parts)
        # One rounding to fp32.
        torch.testing.assert_close(stored["scale_bias"].double(), want, rtol=1e-7, atol=1e-12)
        assert not stored["weight_offset"].any()


def test_shards_and_progress(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", one_by_one(expert_weights()), files=4)
    seen: list[tuple[int, int]] = []
    quantize_checkpoint(
        source, tmp_path / "out", "w8a8_int8", shard_bytes=40_000, progress=lambda *step: seen.append(step)
    )
    whole = _whole(source, tmp_path / "whole")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    tensors = read_tensors(tmp_path / "out")
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert len(set(totals)) == 1
    # Headers of the files are all that is never read as a tensor.
    assert 0.8 * totals[0] < done[-1] <= totals[0]


def _whole(source: Path, out: Path) -> Tensors:
    quantize_checkpoint(source, out, "w8a8_int8")
    assert sorted(path.name for path in out.glob("*.safetensors")) == ["model.safetensors"]
    return read_tensors(out)


def test_the_source_is_not_changed_and_files_can_be_read_by_others(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", fused(expert_weights()))
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    (tmp_path / "out").mkdir()
    quantize_checkpoint(source, tmp_path / "out", "mxfp4_w4a16")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {(source / "config.json").stat().st_mode & 0o777}
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_experts_without_a_gate(tmp_path: Path) -> None:
    weights = expert_weights()
    del weights["gate"]
    source = write_checkpoint(tmp_path / "source", one_by_one(weights))
    quantize_checkpoint(source, tmp_path / "out", "nvfp4", inputs=ModelInputs(default=2688.0))
    tensors = read_tensors(tmp_path / "out")
    assert tensors[f"{MODULE}.1.up_proj.input_scale"] == 1
    stored = of_projection(tensors, f"{MODULE}.1.up_proj")
    assert torch.equal(READERS["nvfp4", "modelopt"](stored), quant_nvfp4(weights["up"][1]).deq)
