"""Names of layers, experts modules and projections."""

from __future__ import annotations

import pytest

from moe_core.expert_names import (
    FUSED,
    HALVES,
    PROJECTIONS,
    ExpertName,
    expert_name,
    halves_of,
    is_draft,
    is_of_experts,
    layer_index,
)
from moe_core.model_layers import DRAFT_MODULES, EXPERTS_MODULES

#: Tables of families -> modules whose tensors have names of their own that are not read: DBRX flattens its experts.
UNREAD = ("transformer.blocks.{layer}.ffn.experts.mlp",)
MODULES = [module for table in (EXPERTS_MODULES, DRAFT_MODULES) for module in table if module not in UNREAD]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_every_known_module_has_its_experts_found(module: str, prefix: str) -> None:
    module = prefix + module.format(layer=12, draft=12)
    stacked = FUSED if module.endswith("experts") else ("input_linear", "output_linear")
    stacked = ("gate_proj", "up_proj", "down_proj") if module.endswith(".moe") else stacked
    for leaf in {*FUSED, *(name for names in PROJECTIONS.values() for name in names)}:
        want = ExpertName(module=module, expert=3, projection=leaf, rest="weight_scale")
        assert expert_name(f"{module}.3.{leaf}.weight_scale") == want
        assert want.halves == halves_of(leaf) != ()
    for leaf in stacked:
        for written, rest in (("", ""), (".weight", "weight"), ("_scale_inv", "scale_inv")):
            assert expert_name(f"{module}.{leaf}{written}") == ExpertName(
                module=module, expert=None, projection=leaf, rest=rest
            )
    draft = module.startswith(f"{prefix}mtp")
    assert is_draft(module) == draft
    assert layer_index(module) == layer_index(f"{module}.3.w1.weight")
    assert layer_index(module) == (None if module.startswith(f"{prefix}mtp.12") else 12)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_experts.up_proj.weight",
        "model.layers.0.shared_mlp.input_linear.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.layers.0.block_sparse_moe.router.layer.weight",
        "model.layers.0.self_attention.experts.input_linear.weight",
        "model.layers.0.moe.gate.weight",
        "visual.merger.mlp.0.weight",
    ],
)
def test_what_stores_no_experts(name: str) -> None:
    assert expert_name(name) is None
    assert not is_of_experts(name)


def test_what_lies_beside_experts_in_their_module_is_of_them() -> None:
    assert is_of_experts("model.layers.0.mlp.experts.0.fc1.weight")
    assert is_of_experts("transformer.blocks.0.ffn.experts.mlp.v1")
    assert expert_name("model.layers.0.mlp.experts.0.fc1.weight") is None


def test_halves() -> None:
    assert HALVES == ("gate", "up", "down")
    assert halves_of("w3") == ("up",)
    assert halves_of("input_linear") == ("gate", "up")
    assert halves_of("experts") == ()


@pytest.mark.error_path
def test_numbers_of_more_digits_than_python_reads_count_nothing() -> None:
    long = "9" * 5000
    assert expert_name(f"model.layers.0.mlp.experts.{long}.up_proj.weight") is None
    assert expert_name(f"model.layers.0.mlp.{long}.up_proj.weight") is None
    assert layer_index(f"model.layers.{long}.mlp.experts") is None
