"""Quantized checkpoints as transformers models, beside the same models with float64 experts."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import relative_error
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_core.errors import InputError, ResolutionError, SpecError, UnsupportedModelError, WeightsError
from moe_core.integrations.transformers import NAME, load_model, prepare
from moe_core.integrations.transformers.stored_experts import find_stored_experts
from moe_core.manager import BackendManager
from moe_core.quantizer.checkpoint import quantize_checkpoint
from moe_core.quantizer.input_amax import ModelInputs
from moe_core.quantizer.words import WRITABLE
from tests.integrations.hf_plain_experts import PlainExperts, decorate
from tests.integrations.hf_quantized import (
    EXPERTS,
    HIDDEN,
    INNER,
    MODULES,
    edit,
    edit_config,
    write_float_mixtral,
    write_gpt_oss,
    write_qwen,
)

CONFIGS = Path(__file__).parents[1] / "quant" / "configs"
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])

# Norm of the error of the logits over their norm: fp32 sums of some hundred terms in the float experts, through two
# layers; where activations are rounded, now and then a code falls to the other side (2**-4 of one fp8 number, more of
# an int4 or fp4 one).
TOLERANCE = {"same": 2e-5, "int8": 2e-3, "fp8": 4e-3, "fp4": 2e-2, "int4": 2e-2}


def _modelslim(kind: str) -> dict[str, Any]:
    suffixes = ("weight", "weight_scale", "weight_offset")
    experts = [f"{module}.{expert}.{word}" for module in MODULES for expert in range(EXPERTS) for word in WORDS]
    return {"quant_method": "modelslim"} | {f"{name}.{suffix}": kind for name in experts for suffix in suffixes}


WORDS = ("gate_proj", "up_proj", "down_proj")
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
    assert 0.9 < reports[-1][0] / reports[-1][1] <= 1.0


# Norm of the logits' error beside the float model. Weights and activations of three matrices in each of two layers are
# off by about 0.7 % each (int8 with the largest of a row at 127), 2.6 % (fp8), 10 % (fp4) and 14 % (int4); the bounds
# are five times that. Experts taken for one another, or gate for up, would give about 140 %.
ROUNDING = {"w8a8_int8": 0.035, "fp8_block": 0.13, "nvfp4": 0.5, "mxfp4": 0.5, "w4a8": 0.7, "w4a4": 0.7}


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


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    write_qwen(folder, FP8)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    shutil.copytree(written, tmp_path / "model")
    return tmp_path / "model"


def change(name: str, tensor: torch.Tensor | None) -> dict[str, Any]:
    return {name.replace(".", "__"): tensor}


def test_quantized_matrices_outside_the_experts_become_floats(folder: Path) -> None:
    codes = (torch.randn(64, HIDDEN) * 40).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.03]])
    edit(folder, **change(f"{Q_PROJ}.weight", codes), **change(f"{Q_PROJ}.weight_scale_inv", scale))
    # Scales of a key-value cache say nothing to a cache of floats.
    edit(folder, **change("model.layers.0.self_attn.k_scale", torch.ones(())))
    loaded = load_model(folder, dtype="bf16")
    weight = loaded.model.get_parameter(f"{Q_PROJ}.weight")
    torch.testing.assert_close(weight, (codes.float() * 0.03).bfloat16(), rtol=0, atol=0)
    assert loaded.experts[MODULES[0]].plan.request.dtype == "bf16"


def test_draft_layers_are_left_in_the_file(folder: Path) -> None:
    edit(folder, **change("model.layers.2.mlp.experts.0.gate_proj.weight", torch.zeros(2, 2)))
    edit(folder, **change("mtp.norm.weight", torch.zeros(2)))
    assert set(load_model(folder).experts) == set(MODULES)


def test_generation_settings_come_along(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7], "max_new_tokens": 3}))
    model = load_model(folder).model
    assert model.generation_config.eos_token_id == [7]
    assert model.generate(IDS, do_sample=False).shape[1] <= IDS.shape[1] + 3


@torch.no_grad()
def test_another_number_of_experts_per_token(written: Path) -> None:
    experts = load_model(written).model.get_submodule(MODULES[0])
    hidden_states, weights = torch.randn(3, HIDDEN), torch.full((3, 1), 0.5)
    pairs = torch.tensor([[0, 3], [1, 2], [2, 0]])
    single = [experts(hidden_states, pairs[:, slot : slot + 1], weights) for slot in (0, 1)]
    both = experts(hidden_states, pairs, weights.expand(-1, 2))
    assert relative_error(both, single[0] + single[1]) <= TOLERANCE["same"]


def test_the_experts_stay_with_moe_core(written: Path) -> None:
    loaded = load_model(written)
    assert prepare(loaded.model).keys() == loaded.experts.keys()
    with pytest.raises(InputError, match=r"prepared when they were loaded; give the pins"):
        prepare(loaded.model, runner_backend="torch")
    with pytest.raises(UnsupportedModelError, match=r"mlp\.experts: quantized experts .* cannot be saved"):
        loaded.model.state_dict()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(loaded.model)
    loaded.model.set_experts_implementation("eager")
    with pytest.raises(UnsupportedModelError, match=r"'eager' cannot compute these experts: .*fp8_block128"):
        loaded.model(IDS)
    loaded.model.set_experts_implementation(NAME)
    assert loaded.model(IDS).logits.isfinite().all()


# Refused ------------------------------------------------------------------------------------------------------


@pytest.mark.error_path
def test_pins_are_pins(written: Path) -> None:
    loaded = load_model(written, runner_backend="torch.masked")
    assert {experts.plan.routes[0].runner.spec.short_name for experts in loaded.experts.values()} == {"torch.masked"}
    with pytest.raises(ResolutionError, match="no backend combination fits"):
        load_model(written, manager=BackendManager())


EXPERT = f"{MODULES[1]}.2"
SPOILED: dict[str, tuple[dict[str, Any], str]] = {
    "expert": (
        change(f"{EXPERT}.up_proj.weight", None) | change(f"{EXPERT}.down_proj.weight_scale_inv", torch.ones(3, 3)),
        r"(?s)nothing was loaded.*2\.up_proj\.weight: missing.*2\.down_proj\.weight_scale_inv",
    ),
    "dense_missing": (
        change(f"{Q_PROJ}.weight", None),
        r"outside the experts do not fit Qwen3MoeForCausalLM; nothing was loaded:\n  .*q_proj\.weight: missing",
    ),
    "dense_unknown": (
        change("model.layers.0.self_attn.sinks", torch.ones(2)),
        r"self_attn\.sinks: unknown to the model",
    ),
    "dense_not_understood": (
        change(f"{Q_PROJ}.weight", torch.zeros(64, 64, dtype=torch.int8)),
        r"quantized tensors outside the experts that are not understood.*\n  .*q_proj\.weight: ",
    ),
    "dense_leftovers": (
        change(f"{Q_PROJ}.weight", torch.zeros(64, 64).to(torch.float8_e4m3fn))
        | change(f"{Q_PROJ}.weight_scale_inv", torch.ones(1, 1))
        | change(f"{Q_PROJ}.rotation", torch.ones(2)),
        r"q_proj\.rotation.*nothing of a matrix in storage scaled reads it",
    ),
}


@pytest.mark.error_path
@pytest.mark.parametrize("name", SPOILED)
def test_tensors_that_do_not_fit(name: str, folder: Path) -> None:
    changes, message = SPOILED[name]
    edit(folder, **changes)
    with pytest.raises(WeightsError, match=message):
        load_model(folder)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "nobodys"}, UnsupportedModelError, r"cannot be loaded: .*nobodys"),
        ({"model_type": "vit"}, UnsupportedModelError, r"no causal language model for 'vit'"),
        ({"quantization_config": {"quant_method": "magic"}}, SpecError, r"quant_method 'magic' is not read"),
        ({"dtype": None}, SpecError, r"names no dtype"),
        (
            {"num_experts": 5, "num_local_experts": 5},
            WeightsError,
            r"gate\.weight: has shape \[4, 64\], the model \[5, 64\]",
        ),
    ],
)
def test_configurations_that_do_not_fit(
    changes: dict[str, Any], error: type[Exception], message: str, folder: Path
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(error, match=message):
        load_model(folder)


@pytest.mark.error_path
def test_a_class_that_computes_something_else_is_refused(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return hidden_states

    monkeypatch.setattr(Qwen3MoeExperts, "forward", forward)
    with pytest.raises(UnsupportedModelError, match=r"Qwen3MoeExperts .* computes something else than its flags say"):
        load_model(written)


@pytest.mark.error_path
def test_weights_besides_the_projections_are_refused() -> None:
    experts: Any = decorate(PlainExperts)
    experts.act_fn = nn.PReLU()
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": experts})])})
    names = [f"layers.0.experts.{expert}.{word}.weight" for expert in range(4) for word in WORDS]
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.experts has weights .* \(act_fn\.weight\)"):
        find_stored_experts(model, names, FP8, "fp32", torch.device("cpu"))
