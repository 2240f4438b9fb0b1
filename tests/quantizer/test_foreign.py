"""The layouts against those who define them: their writers make the same bytes, their readers read the same numbers.

compressed-tensors and transformers run here; files of tools that are no dependencies lie in `foreign`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import (
    MODULE,
    NAMES,
    READERS,
    expert_weights,
    of_projection,
    one_by_one,
    read_tensors,
    write_checkpoint,
)
from tiny_models import write_tiny_qwen

from moe_core.quantizer.checkpoint import quantize_checkpoint
from moe_core.quantizer.input_amax import ModelInputs
from moe_core.quantizer.layout import Expert
from moe_core.quantizer.modelslim import _scale_bias
from moe_core.quantizer.nvfp4 import pack_nvfp4
from moe_core.quantizer.rounding import Quantized, nvfp4_global_scale
from moe_core.weights.codes import pack

FOREIGN = Path(__file__).parent / "foreign"
#: Presets of compressed-tensors, and what each stored format is called.
COMPRESSED = {
    "w8a8_int8": ("W8A8", "int-quantized"),
    "nvfp4": ("NVFP4", "nvfp4-pack-quantized"),
    "mxfp4_w4a16": ("MXFP4A16", "mxfp4-pack-quantized"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one model by scheme."""
    folder = tmp_path_factory.mktemp("checkpoints")
    # Without zero blocks: writers agree on their codes, and differ in the scales that these never use.
    weights = {half: torch.where(weight == 0, 0.01, weight) for half, weight in expert_weights().items()}
    source = write_checkpoint(folder / "source", one_by_one(weights))
    for scheme in COMPRESSED:
        inputs = ModelInputs(default=5.0) if scheme == "nvfp4" else None
        quantize_checkpoint(source, folder / scheme, scheme, ecosystem="compressed_tensors", inputs=inputs)
    quantize_checkpoint(source, folder / "fp8_block128", "fp8_block128")
    return folder


def _config(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "config.json").read_text())["quantization_config"])


@pytest.mark.parametrize("scheme", COMPRESSED)
def test_compressed_tensors_writes_the_same_bytes(scheme: str, written: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    preset, word = COMPRESSED[scheme]
    compressor = BaseCompressor.get_value_from_registry(word)
    theirs = preset_name_to_scheme(preset, ["Linear"])
    source, ours = read_tensors(written / "source"), read_tensors(written / scheme)
    for projection in NAMES.values():
        stored = of_projection(ours, f"{MODULE}.2.{projection}")
        # Given in float64, since it divides in the dtype that it is given and fp32 would see ties where there are none.
        given = {"weight": source[f"{MODULE}.2.{projection}.weight"].double()}
        given["weight_scale"] = _as_factor(stored["weight_scale"])
        if "weight_global_scale" in stored:
            given["weight_global_scale"] = stored["weight_global_scale"].double()
            given["input_global_scale"] = stored["input_global_scale"]
        made = compressor.compress(given, theirs)
        assert made.keys() == stored.keys()
        # Its list leaves out the scale of activations, although its own checkpoints have it.
        assert stored.keys() - {"input_global_scale"} == set(compressor.compression_param_names(theirs))
        for name, tensor in stored.items():
            # What was given in float64 comes back as it was.
            if made[name].dtype != torch.float64:
                assert made[name].dtype == tensor.dtype
                assert torch.equal(made[name].view(torch.uint8), tensor.view(torch.uint8))


def _as_factor(scale: torch.Tensor) -> torch.Tensor:
    """A stored scale in float64; exponent bytes as the powers of two that they stand for."""
    return 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()


@pytest.mark.parametrize("scheme", COMPRESSED)
def test_compressed_tensors_understands_the_configuration(scheme: str, written: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

    preset, word = COMPRESSED[scheme]
    config = QuantizationConfig.model_validate(_config(written / scheme))
    assert config.quant_method == "compressed-tensors"
    assert config.format == word
    assert config.quantization_status == QuantizationStatus.COMPRESSED
    (group,) = config.config_groups.values()
    assert group.targets == ["Linear"]
    assert infer_module_format(torch.nn.Linear, group).value == word
    wanted = preset_name_to_scheme(preset, ["Linear"])
    for part in ("weights", "input_activations"):
        # How its own calibration finds the scales is no part of what is stored.
        drop = {"observer", "observer_kwargs", "zp_dtype"}
        ours, theirs = getattr(group, part), getattr(wanted, part)
        assert (ours and ours.model_dump(exclude=drop)) == (theirs and theirs.model_dump(exclude=drop))


def test_transformers_reads_the_same_numbers(written: Path) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    ours = read_tensors(written / "source") | read_tensors(written / "fp8_block128")
    stored = of_projection(ours, f"{MODULE}.1.up_proj")
    # Its reader takes whole tiles: the first tile of rows and columns of a tensor that is cut at the edges.
    weight = torch.zeros(128, 256).to(torch.float8_e4m3fn)
    weight[: stored["weight"].shape[0], : stored["weight"].shape[1]] = stored["weight"]
    values = fp8.Fp8Dequantize(None)._dequantize_one(weight, stored["weight_scale_inv"], torch.float32)
    rows, columns = stored["weight"].shape
    # One fp32 product.
    want = READERS["fp8_block128", "transformers"](stored)
    torch.testing.assert_close(values[:rows, :columns].double(), want, rtol=1e-7, atol=0)


def test_transformers_understands_the_configuration(written: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.quantizers.quantizers_utils import should_convert_module

    config = transformers.FineGrainedFP8Config(**_config(written / "fp8_block128"))
    assert config.quant_method == "fp8"
    assert tuple(config.weight_block_size) == (128, 128)
    skip = config.modules_to_not_convert
    assert should_convert_module(MODULE, skip)
    for name in (
        "lm_head",
        "model.layers.1.mlp.gate",
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.mlp.gate_proj",
    ):
        assert not should_convert_module(name, skip)


def test_modelslim_packs_the_same_bytes() -> None:
    theirs = load_file(FOREIGN / "modelslim.safetensors")
    quantized = Quantized(theirs["codes"], theirs["scale"])
    assert torch.equal(pack(quantized.codes, axis=0), theirs["weight"])
    for name, parts in (("gate_proj", 1), ("down_proj", 16)):
        want = theirs[f"scale_bias.{name}"]
        # Theirs is a sum of fp32 products of up to 7: 64 roundings of at most 6e-8 of its largest partial sum.
        torch.testing.assert_close(_scale_bias(quantized, parts), want, rtol=1e-5, atol=1e-4)
        assert want.shape == (24, parts)


def test_modelopt_packs_the_same_bytes() -> None:
    theirs = load_file(FOREIGN / "modelopt.safetensors")
    expert = Expert(weights={half: theirs[f"{half}.input"] for half in ("gate", "up")})
    for half, packed in pack_nvfp4(expert, divides=False).items():
        assert torch.equal(packed.weight, theirs[f"{half}.weight"])
        assert torch.equal(packed.scale.view(torch.uint8), theirs[f"{half}.weight_scale"].view(torch.uint8))
        assert packed.global_scale == theirs["scale_2"]
    largest = torch.maximum(theirs["gate.input"].abs().amax(), theirs["up.input"].abs().amax())
    assert theirs["scale_2"] == nvfp4_global_scale(largest)


def test_transformers_loads_mxfp4_experts(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    write_tiny_qwen(tmp_path / "source", hidden_size=64, moe_intermediate_size=32, num_experts=3, dtype="bfloat16")
    quantize_checkpoint(tmp_path / "source", tmp_path / "out", "mxfp4_w4a16")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    experts, tensors = loaded.model.layers[0].mlp.experts, read_tensors(tmp_path / "out")
    for expert in range(3):
        stored = {
            half: READERS["mxfp4_w4a16", "compressed_tensors"](
                of_projection(tensors, f"model.layers.0.mlp.experts.{expert}.{name}")
            )
            for half, name in NAMES.items()
        }
        # Exact: a product of two bits and a power of two fits bf16.
        assert torch.equal(experts.gate_up_proj[expert].double(), torch.cat([stored["gate"], stored["up"]]))
        assert torch.equal(experts.down_proj[expert].double(), stored["down"])
