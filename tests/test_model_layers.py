"""Which layers of a model have experts, and what checkpoints call their modules."""

from __future__ import annotations

import pytest
from model_configs import changed

from moe_core.errors import SpecError
from moe_core.model_config import draft_layer_groups, layer_groups
from moe_core.model_layers import DRAFT_MODULES, EXPERTS_MODULES, draft_modules, experts_module

pytestmark = pytest.mark.error_path


@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"num_dense_layers": 1}, (1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "hash_moe", "dense"]}, (1, 2, 4)),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe"]}, (1, 3)),
        ({"layers_block_type": ["mamba", "attention"] * 3}, (0, 1, 2, 3, 4, 5)),
        ({"hybrid_override_pattern": "ME*E"}, (1, 3)),
        ({"moe_layers": [0, 5], "interleave_moe_layer_step": 3}, (0, 5)),
        ({"interleave_moe_layer_step": 3}, (2, 5)),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3, 5)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}, (1, 2, 3, 4, 5)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2}, (1, 3)),
        ({"moe_layer_freq": [0, 1, 1, 0, 0, 1]}, (1, 2, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
    ],
    ids=str,
)
def test_layers_with_experts(rule, layers):
    (group,) = layer_groups(changed(**rule))
    assert group.layers == layers


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("mixtral", "model.layers.7.block_sparse_moe.experts"),
        ("minimax_m2", "model.layers.7.block_sparse_moe.experts"),
        ("jamba", "model.layers.7.feed_forward.experts"),
        ("nemotron_h", "backbone.layers.7.mixer.experts"),
        ("deepseek_v4", "layers.7.ffn.experts"),
        ("qwen3_moe", "model.layers.7.mlp.experts"),
        ("of_tomorrow", "model.layers.7.mlp.experts"),
    ],
)
def test_names_of_experts_modules(family, module):
    assert experts_module({"model_type": family}, 7) == module


def test_a_family_has_one_entry():
    for table in (EXPERTS_MODULES, DRAFT_MODULES):
        families = [family for entry in table.values() for family in entry]
        assert len(families) == len(set(families))


@pytest.mark.parametrize(
    ("family", "key", "modules"),
    [
        ("deepseek_v3", "num_nextn_predict_layers", {6: "model.layers.6.mlp.experts", 7: "model.layers.7.mlp.experts"}),
        ("glm4_moe", "num_mtp_layers", {6: "model.layers.6.mlp.experts", 7: "model.layers.7.mlp.experts"}),
        ("qwen3_5_moe_text", "mtp_num_hidden_layers", {6: "mtp.layers.0.mlp.experts", 7: "mtp.layers.1.mlp.experts"}),
        ("deepseek_v4", "num_nextn_predict_layers", {6: "mtp.0.ffn.experts", 7: "mtp.1.ffn.experts"}),
    ],
)
def test_names_of_draft_layers(family, key, modules):
    assert draft_modules(changed(model_type=family, **{key: 2})) == modules
    assert draft_layer_groups(changed(model_type=family, **{key: 0})) == ()
    assert draft_layer_groups(changed(model_type=family)) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 1}, "'some_moe', num_nextn_predict_layers 1: where draft layers .* is not known"),
        ({"model_type": "deepseek_v3", "num_mtp_layers": "one"}, 'num_mtp_layers "one": expected whole numbers'),
        ({"model_type": "qwen3_next", "num_mtp_layers": 10**11}, "expected whole numbers up to 4096"),
    ],
    ids=str,
)
def test_draft_layers_that_are_not_understood(changes, message):
    with pytest.raises(SpecError, match=message):
        draft_layer_groups(changed(**changes))
