"""Quantized checkpoints as transformers models, beside the same models with float64 experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import relative_error
from tiny_checkpoints import read_tensors

from moe_core.integrations.transformers import load_model
from moe_core.quantizer.checkpoint import quantize_checkpoint
from moe_core.quantizer.input_amax import ModelInputs
from moe_core.quantizer.words import WRITABLE
from tests.integrations.hf_quantized import (
    EXPERTS,
    HIDDEN,
    IDS,
    INNER,
    MODULES,
    TOLERANCE,
    WORDS,
    write_float_mixtral,
    write_gpt_oss,
    write_qwen,
)

CONFIGS = Path(__file__).parents[1] / "quant" / "configs"


def _modelslim(kind: str) -> dict[str, Any]:
    suffixes = ("weight", "weight_scale", "weight_offset")
    experts = [f"{module}.{expert}.{word}" for module in MODULES for expert in range(EXPERTS) for word in WORDS]
    return {"quant_method": "modelslim"} | {f"{name}.{suffix}": kind for name in experts for suffix in suffixes}


MODELSLIM = {f"modelslim_{kind.lower()}": kind for kind in ("W8A8_DYNAMIC", "W4A8_DYNAMIC", "W4A4_DYNAMIC")}


FILES = (
    "fp8_block128",
    "fp8_block128_ue8m0",
    "fp8_fp4_experts",
    "fp8_tensor_static",
    "mxfp8",
    "awq_g128",
    "gptq_g128",
    "gptq_v2_asym",
    "ct_w8a8_int8",
    "ct_w4a16_g32",
    "ct_w4a16_asym_g128",
    "ct_w4a8_int8",
    "ct_fp8_block",
    "ct_fp8_static",
    "ct_nvfp4",
    "ct_mxfp4",
    "modelopt_nvfp4",
    "modelopt_fp8",
)


def quantization(name: str) -> dict[str, Any]:
    if name in MODELSLIM:
        return _modelslim(MODELSLIM[name])
    content: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("name", [*FILES, *MODELSLIM])
@torch.no_grad()
def test_every_storage_loads_and_computes_what_it_says(name: str, tmp_path: Path) -> None:
    reference = write_qwen(tmp_path, quantization(name))
    reports: list[tuple[int, int]] = []
    loaded = load_model(tmp_path, progress=lambda done, total: reports.append((done, total)))
    assert set(loaded.experts) == set(MODULES)
    schemes = {module: experts.plan.request.quant.w13 for module, experts in loaded.experts.items()}
    tolerance = max(TOLERANCE[scheme.activation_dtype] for scheme in schemes.values())
    assert relative_error(loaded.model(IDS).logits, reference(IDS).logits) <= tolerance
    # Quantized experts exist in stored form alone. Some of these configurations leave the first layer alone.
    quantized = {module for module, scheme in schemes.items() if scheme.is_quantized}
    floats = {key.rpartition(".")[0] for key, _ in loaded.model.named_parameters() if ".experts." in key}
    assert floats == set(MODULES) - quantized
    assert MODULES[1] in quantized
    assert loaded.num_parameters == loaded.model.num_parameters() + len(quantized) * EXPERTS * 3 * HIDDEN * INNER
    assert reports == sorted(reports)
    # Every byte of the checkpoint counts once, so that the end is reached at the end and not before.
    total = sum(tensor.nbytes for tensor in read_tensors(tmp_path).values())
    assert {of for _, of in reports} == {total}
    assert reports[-1] == (total, total)
    # The last tensor may be put down in two pieces.
    assert reports.count((total, total)) <= 2


# Norm of the logits' error beside the float model. Weights and activations of three matrices in each of two layers are
# off by about 0.7 % each (int8 with the largest of a row at 127), 2.6 % (fp8), 10 % (fp4) and 14 % (int4); the bounds
# are five times that. Experts taken for one another, or gate for up, would give about 140 %.
ROUNDING = {
    "w8a8_int8": 0.035,
    "fp8_block128": 0.13,
    "nvfp4": 0.5,
    "mxfp4_w4a16": 0.5,
    "w4a8_int8": 0.7,
    "w4a4_int4": 0.7,
}


@pytest.mark.parametrize(("scheme", "ecosystem"), [(s, e) for s, names in WRITABLE.items() for e in names])
@torch.no_grad()
def test_what_the_quantizer_writes(scheme: str, ecosystem: str, tmp_path: Path) -> None:
    """A model that transformers stores under other names than its modules have."""
    model = write_float_mixtral(tmp_path / "float")
    inputs = ModelInputs(default=8.0) if scheme == "nvfp4" else None
    quantize_checkpoint(tmp_path / "float", tmp_path / "written", scheme, ecosystem=ecosystem, inputs=inputs)
    loaded = load_model(tmp_path / "written")
    error = relative_error(loaded.model(IDS).logits, model(IDS).logits)
    assert ROUNDING[scheme] / 50 <= error <= ROUNDING[scheme]


@torch.no_grad()
def test_gpt_oss_with_biases_and_its_own_gate(tmp_path: Path) -> None:
    reference = write_gpt_oss(tmp_path)
    loaded = load_model(tmp_path)
    request = loaded.experts[MODULES[0]].plan.request
    assert request.bias
    assert (request.activation.row_order, request.activation.limit) == ("interleaved", 7.0)
    assert relative_error(loaded.model(IDS).logits, reference(IDS).logits) <= TOLERANCE["same"]


@torch.no_grad()
def test_layers_of_different_schemes(tmp_path: Path) -> None:
    kinds = {MODULES[0]: "W8A8_DYNAMIC", MODULES[1]: "FLOAT"}
    description = {
        key: kinds[key.partition(".experts.")[0] + ".experts"] if key.startswith("model.") else value
        for key, value in _modelslim("").items()
    }
    reference = write_qwen(tmp_path, description)
    loaded = load_model(tmp_path)
    labels = {module: experts.plan.request.quant.label for module, experts in loaded.experts.items()}
    assert labels == {MODULES[0]: "w8a8_int8", MODULES[1]: "fp32"}
    assert relative_error(loaded.model(IDS).logits, reference(IDS).logits) <= TOLERANCE["int8"]
