"""One rule that shrinks the configuration class of any MoE model in transformers, and what the rule cannot know."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from transformers import PreTrainedConfig

# Given to every configuration that has the field. The sides of a matrix differ (64; 48 or 24, once or twice), so that a
# mistaken transposition is a shape error. As many key-value heads as query heads, which latent attention demands.
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "unpadded_vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "moe_hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "dense_intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
    # No leading dense layers: every layer of the tiny model is to hold experts.
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "mlp_only_layers": [],
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "head_dim": 16,
    "swa_head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 64,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
}

# By configuration class: what its model needs beyond the rule (a missing default, or sizes tied to one another).
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "Dots1Config": {"n_shared_experts": 1},
    "Dots3NoteTextConfig": {"layer_types": ["indexed_attention"] * 2},  # the other kind brings sizes of its own
    "Ernie4_5_MoeConfig": {"moe_layer_start_index": 0},
    "Ernie4_5_VLMoeTextConfig": {
        "moe_intermediate_size": [24, 40],  # text experts, vision experts
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},  # fill half a head
    },
    "Gemma4TextConfig": {"enable_moe_block": True},
    "Glm4vMoeTextConfig": {"head_dim": 128},  # rotary sections [8, 12, 12] fill a quarter of a head
    "Glm5NextTextConfig": {"qk_rope_head_dim": 0},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "HYV4VLTextConfig": {"qk_rope_head_dim": 64, "index_head_dim": 80},  # rotary sections [12, 10, 10] fill half of 64
    "HunYuanMoEV1Config": {"head_dim": 16},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "MiMoV2FlashConfig": {"num_key_value_heads": 2},  # sliding layers double it
    "NemotronHConfig": {"moe_latent_size": 32},  # experts then work on 32 columns; their `hidden_dim` still says 64
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 24},  # read by the model, no field of its own
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "ZayaConfig": {"num_experts_per_tok": 1},  # nothing else is supported
}


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """An instance of any MoE model's configuration class with every size reduced, all else at its defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    sizes = {name: value for name, value in _SIZES.items() if name in fields}
    if fields.get("head_dim") is None:
        sizes.pop("head_dim", None)  # then it follows from other sizes
    chosen = sizes | _layer_kinds(config_class(), fields) | _EXCEPTIONS.get(config_class.__name__, {})
    return config_class(**copy.deepcopy(chosen))


def _layer_kinds(default: PreTrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind of attention of the full-size model, at least two; all with the MLP of its last layer."""
    chosen: dict[str, Any] = {"num_hidden_layers": 2} if "num_hidden_layers" in fields else {}
    if "layer_types" in fields and default.layer_types:
        kinds = list(dict.fromkeys(default.layer_types))
        chosen["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        chosen["num_hidden_layers"] = len(chosen["layer_types"])
    if "mlp_layer_types" in fields:
        # Sparse layers come last everywhere; where no default is given, this is their usual name.
        kind = default.mlp_layer_types[-1] if default.mlp_layer_types else "sparse"
        chosen["mlp_layer_types"] = [kind] * chosen["num_hidden_layers"]
    return chosen
