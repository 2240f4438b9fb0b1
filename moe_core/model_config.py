"""From a Hugging Face `config.json` to layer requests, without transformers and without torch.

Families name the same sizes differently; the tables below list those names. What is not in them is an error, never a
guess: a request with the wrong activation resolves well and computes fluent nonsense.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from moe_core.activation import SWIGLU, SWIGLU_OAI, ActivationSpec
from moe_core.errors import SpecError, UnknownNameError
from moe_core.quant import LayerQuant, QuantScheme
from moe_core.request import LayerRequest

#: Names of one size, first present wins. `intermediate_size` is the experts' only where no name of its own exists.
SIZE_NAMES = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "top_k",
    ),
    "hidden_size": ("moe_latent_size", "moe_hidden_size", "hidden_size"),
    "intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
}
_NESTED = ("text_config", "thinker_config", "language_config", "llm_config")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_ACTIVATION_NAMES = ("mlp_hidden_act", "hidden_activation", "hidden_act")

# What these families do is written in their code and not in their configuration.
_ALWAYS_SILU = ("aria_text", "lfm2_moe")
_NOT_GATED = ("nemotron_h",)
_CLAMPED_SILU = ("deepseek_v4", "glm5_next_text", "hy_v4", "hy_v4_vl_text")
_CLAMPED_OAI = {"gpt_oss": "interleaved", "minimax_m3_vl_text": "gate_up"}
_GATE_NOT_READ = ("beam", "inkling2_text", "inkling2_loop_text", "openai_privacy_filter", "step3p5")
_TRAITS: dict[str, dict[str, bool]] = {
    "gpt_oss": {"bias": True},
    "llama4_text": {"weight_on_input": True},
    "muse_spark_text": {"post_norm": True},
}


@attrs.frozen(kw_only=True)
class LayerGroup:
    """Layers of a model that ask for the same.

    Attributes:
        layers: Their indices, ascending.
        request: What each of them asks for, without workloads, parallelism or pins.
    """

    layers: tuple[int, ...]
    request: LayerRequest


def read_config(path: Path) -> dict[str, Any]:
    """The content of a `config.json`, given itself or by the folder it lies in.

    Raises:
        SpecError: No such file, or not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SpecError(f"no model at {path}: expected a folder with a config.json, or such a file") from error
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"model configuration {file}: not readable as JSON ({error})") from error
    if not isinstance(config, dict):
        raise SpecError(f"model configuration {file}: expected a JSON object, got {type(config).__name__}")
    return config


def layer_groups(
    config: Mapping[str, Any], *, dtype: str | None = None, quant: QuantScheme | LayerQuant | None = None
) -> tuple[LayerGroup, ...]:
    """The MoE layers of a model, equal ones together, in the order of their first layers.

    Args:
        config: The content of a `config.json`; models with several parts are read at their text part.
        dtype: Layer dtype instead of the configuration's.
        quant: Scheme of the weights instead of the configuration's.

    Raises:
        SpecError: Not an MoE model, or something is missing, contradictory or not understood; names it.
        UnknownNameError: An activation or dtype that this project does not know.
    """
    text = _text_part(config)
    dtype = dtype or _dtype(config, text)
    groups: dict[LayerRequest, list[int]] = {}
    for layer in _moe_layers(text):
        hf = text.get("quantization_config") or config.get("quantization_config")
        fields: dict[str, Any] = {name: _size(text, name, layer) for name in SIZE_NAMES}
        fields |= _TRAITS.get(_model_type(text), {})
        fields["quant"] = quant or QuantScheme.from_hf(hf, f"model.layers.{layer}.mlp.experts", dtype)
        request = LayerRequest(activation=_activation(text), dtype=dtype, **fields)
        groups.setdefault(request, []).append(layer)
    if not groups:
        raise SpecError(f"model type {_model_type(text)!r}: its configuration makes every layer dense")
    return tuple(LayerGroup(layers=tuple(layers), request=request) for request, layers in groups.items())


def _model_type(text: Mapping[str, Any]) -> str:
    return str(text.get("model_type", "?"))


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in _NESTED:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            return _text_part({"model_type": config.get("model_type"), **nested})
    return config


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    named = next((part[key] for part in (text, config) for key in ("dtype", "torch_dtype") if part.get(key)), None)
    if named is None:
        raise SpecError("the model configuration names no dtype (dtype or torch_dtype); say which one to use")
    word = str(named).removeprefix("torch.")
    if word not in _DTYPES:
        raise UnknownNameError("dtype of the model configuration", word, _DTYPES)
    return _DTYPES[word]


def _size(text: Mapping[str, Any], size: str, layer: int) -> int:
    present = {name: text[name] for name in SIZE_NAMES[size] if text.get(name) is not None}
    where = f"model type {_model_type(text)!r}, {size}"
    if not present:
        raise SpecError(f"{where}: none of {', '.join(SIZE_NAMES[size])} is in the configuration; is it an MoE model?")
    if size == "num_experts" and len(set(map(str, present.values()))) > 1:
        raise SpecError(f"{where}: the configuration contradicts itself ({present})")
    name, value = next(iter(present.items()))
    if isinstance(value, list):
        if len(value) != text.get("num_hidden_layers"):
            raise SpecError(f"{where}: {name} has {len(value)} entries, expected one per layer")
        value = value[layer]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{where}: expected {name} to be a whole number >= 1, got {value!r}")
    return value


def _activation(text: Mapping[str, Any]) -> ActivationSpec:
    family = _model_type(text)
    if family in _GATE_NOT_READ:
        raise SpecError(f"model type {family!r}: its gate cannot be read from the configuration; give sizes by hand")
    if family in _CLAMPED_OAI:
        alpha, limit = text.get("swiglu_alpha", SWIGLU_OAI.alpha), text.get("swiglu_limit", SWIGLU_OAI.limit)
        return attrs.evolve(SWIGLU_OAI, alpha=alpha, limit=limit, row_order=_CLAMPED_OAI[family])
    if family in _ALWAYS_SILU:
        return SWIGLU
    name = next((text[key] for key in _ACTIVATION_NAMES if text.get(key)), None)
    if name is None:
        raise SpecError(f"model type {family!r}: none of {', '.join(_ACTIVATION_NAMES)} is in the configuration")
    if name not in _KINDS:
        raise UnknownNameError("activation", str(name), _KINDS)
    clamp = {key: value for key, value in text.items() if key.startswith("swiglu_") and value is not None}
    if clamp and (family not in _CLAMPED_SILU or set(clamp) != {"swiglu_limit"}):
        raise SpecError(f"model type {family!r}: it is not known what {', '.join(clamp)} mean here")
    return ActivationSpec(kind=_KINDS[name], gated=family not in _NOT_GATED, limit=clamp.get("swiglu_limit"))


def _moe_layers(text: Mapping[str, Any]) -> Sequence[int]:
    """Indices of the layers with experts: those that a list names, else all that the rules let pass."""
    if isinstance(text.get("moe_layers"), list):
        return tuple(text["moe_layers"])
    for name, words in _KIND_PER_LAYER.items():
        kinds = text.get(name) or ()
        # Hybrid models whose experts follow another rule list their attention kinds under the same name.
        if kinds and ("dense" in kinds or not words.isdisjoint(kinds)):
            return [layer for layer, kind in enumerate(kinds) if kind in words]
    count = text.get("num_hidden_layers")
    where = f"model type {_model_type(text)!r}"
    if not isinstance(count, int) or count < 1:
        raise SpecError(f"{where}: num_hidden_layers is {count!r}, expected a number of layers")
    rules = {name: rule for name, rule in _LAYER_RULES.items() if text.get(name) is not None}
    try:
        return [layer for layer in range(count) if all(rule(text, layer, count) for rule in rules.values())]
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        values = {name: text[name] for name in rules}
        raise SpecError(f"{where}: which layers have experts is not understood from {values} ({error})") from error


#: Configuration key that gives each layer a word -> the words of layers with experts.
_KIND_PER_LAYER = {
    "mlp_layer_types": {"sparse", "moe", "hash_moe"},
    "layers_block_type": {"moe"},
    "hybrid_override_pattern": {"E"},
}


def _by_frequency(text: Mapping[str, Any], layer: int, count: int) -> bool:
    frequency = text["moe_layer_freq"]
    return bool(frequency[layer]) if isinstance(frequency, list) else layer % int(frequency) == 0


def _up_to_end(text: Mapping[str, Any], layer: int, count: int) -> bool:
    return layer <= int(text["moe_layer_end_index"]) % count


#: Configuration key -> whether that key lets a layer have experts; a layer must pass every key that is present.
_LAYER_RULES: dict[str, Callable[[Mapping[str, Any], int, int], bool]] = {
    "first_k_dense_replace": lambda text, layer, _: layer >= text["first_k_dense_replace"],
    "num_dense_layers": lambda text, layer, _: layer >= text["num_dense_layers"],
    "mlp_only_layers": lambda text, layer, _: layer not in text["mlp_only_layers"],
    "decoder_sparse_step": lambda text, layer, _: (layer + 1) % text["decoder_sparse_step"] == 0,
    "moe_layer_freq": _by_frequency,
    "interleave_moe_layer_step": lambda text, layer, _: (layer + 1) % text["interleave_moe_layer_step"] == 0,
    "expert_layer_period": lambda text, layer, _: (
        layer % text["expert_layer_period"] == text.get("expert_layer_offset", 0)
    ),
    "moe_layer_start_index": lambda text, layer, _: layer >= text["moe_layer_start_index"],
    "moe_layer_end_index": _up_to_end,
    "moe_layer_interval": lambda text, layer, _: (layer + 1) % text["moe_layer_interval"] == 0,
}
