from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loaded_experts import check, make_request, stored_layer, wanted_share
from stored_experts import save, write_layer

from moe_core.errors import WeightsError
from moe_core.quant import BF16, FP8_BLOCK128, StoredLayer, StoredScheme
from moe_core.weights.checkpoint import Checkpoint, InMemory
from moe_core.weights.loading import load_experts
from moe_core.weights.names import experts_module, experts_modules, find_parts, names_below

MODULES = [
    "model.layers.3.mlp.experts",
    "model.layers.10.block_sparse_moe.experts",
    "model.layers.61.mlp.experts",
    "mtp.layers.0.mlp.experts",
]
NAMES = [
    *(f"{module}.{expert}.down_proj.weight" for module in MODULES for expert in (0, 1)),
    "model.layers.3.mlp.shared_experts.down_proj.weight",
    "model.layers.3.mlp.gate.weight",
    "model.layers.0.mlp.down_proj.weight",
]


def test_modules_with_experts() -> None:
    assert experts_modules(NAMES) == tuple(MODULES)
    assert experts_modules(["model.language_model.layers.1.mlp.experts.gate_up_proj_blocks"]) == (
        "model.language_model.layers.1.mlp.experts",
    )
    assert experts_modules(["model.layers.1.mlp.experts.gate_up_proj"]) == ("model.layers.1.mlp.experts",)
    granite = [f"model.layers.1.block_sparse_moe.{name}.weight" for name in ("input_linear", "router.layer")]
    assert experts_modules(granite) == ("model.layers.1.block_sparse_moe",)


@pytest.mark.parametrize(
    ("layer", "module"),
    [(3, MODULES[0]), (10, MODULES[1]), (61, MODULES[2]), ("mtp.layers.0", MODULES[3]), ("mtp", MODULES[3])],
)
def test_the_module_of_a_layer(layer: int | str, module: str) -> None:
    assert experts_module(NAMES, layer) == module


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (0, r"no experts module fits 'layers.0'; there are model.layers.3.mlp.experts, model"),
        ("mlp", r"several experts modules fit 'mlp'; there are model.layers.3"),
    ],
)
def test_no_module_or_several(layer: int | str, match: str) -> None:
    with pytest.raises(WeightsError, match=match):
        experts_module(NAMES, layer)


@pytest.mark.error_path
@pytest.mark.parametrize("digits", ["\u00b2", "9" * 5000], ids=["raised", "many"])
def test_digits_that_make_no_number_are_words(digits: str) -> None:
    names = [f"model.layers.{number}.mlp.experts.0.up_proj.weight" for number in (digits, 10, 9)]
    with pytest.raises(WeightsError, match=rf"there are model.layers.{digits}.mlp.experts, model.layers.9.mlp.experts"):
        experts_module(names, 0)


@pytest.mark.parametrize("words", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("module", MODULES)
def test_names_of_projections(words: tuple[str, str, str], module: str, tmp_path: Path) -> None:
    request = make_request(BF16)
    stored = write_layer(tmp_path, request, ("plain", "plain"), module=module, words_used=words)
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_experts(checkpoint, module, request, stored_layer(request, "plain"))
    check(weights, request, wanted_share(stored, request, (0, 1, 2), 0))


STORED = StoredLayer(StoredScheme(FP8_BLOCK128, "scaled"), StoredScheme(FP8_BLOCK128, "scaled"))


@pytest.mark.error_path
def test_a_module_without_tensors() -> None:
    with pytest.raises(WeightsError, match=r"no tensors under model.experts; experts lie in model.layers.3"):
        names_below(InMemory(dict.fromkeys(NAMES, torch.zeros(1))), "model.experts")


@pytest.mark.error_path
def test_rows_that_lie_by_turns_are_no_halves() -> None:
    names = frozenset({"experts.w13_weight", "experts.w13_weight_scale", "experts.w2_weight"})
    with pytest.raises(WeightsError, match=r"w13 is stored under none of .* there are experts\.w13_weight"):
        find_parts(names, "experts", StoredLayer(StoredScheme(BF16), StoredScheme(BF16)), gated=True, bias=False)


@pytest.mark.parametrize(
    ("module", "router"),
    [
        ("model.layers.0.block_sparse_moe", "router.layer.weight"),
        ("model.layers.0.mlp.experts", "e_score_correction_bias"),
    ],
)
def test_a_router_below_the_module_is_not_of_the_experts(module: str, router: str) -> None:
    experts = {f"{module}.3.gate_proj.weight", f"{module}.3.gate_proj.weight_scale"}
    names = [*experts, f"{module}.{router}"]
    assert names_below(InMemory(dict.fromkeys(names, torch.zeros(1))), module) == experts


@pytest.mark.error_path
def test_projections_of_unknown_names() -> None:
    names = frozenset({"experts.0.fc1.weight", "experts.0.fc2.weight"})
    with pytest.raises(
        WeightsError, match=r"stored under none of gate_up_proj, .*gate_proj \+ up_proj, w1 \+ w3; there"
    ):
        find_parts(names, "experts", STORED, gated=True, bias=False)


def test_experts_of_other_layers_are_not_read(tmp_path: Path) -> None:
    request = make_request(BF16)
    stored = write_layer(tmp_path, request, ("plain", "plain"), module="layers.1.experts")
    save(tmp_path, stored.tensors | {"layers.1.experts_norm": torch.ones(2), "layers.11.experts.0.w1.x": torch.ones(2)})
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.under("layers.1.experts") == stored.tensors.keys()
        weights = load_experts(checkpoint, "layers.1.experts", request, stored_layer(request, "plain"))
    check(weights, request, wanted_share(stored, request, (0, 1, 2), 0))
