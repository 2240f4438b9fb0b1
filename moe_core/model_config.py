"""From a Hugging Face `config.json` to layer requests, without transformers and without torch.

Families name the same sizes differently; the tables below list those names. What is not in them is an error, never a
guess: a request with the wrong activation resolves well and computes fluent nonsense.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import attrs

from moe_core.activation import SWIGLU, SWIGLU_OAI, ActivationSpec
from moe_core.errors import SpecError, UnknownNameError, counted
from moe_core.json_files import ENCODING, shown
from moe_core.model_layers import draft_modules, experts_module, model_type, moe_layers
from moe_core.quant import LayerQuant, QuantScheme, read_layer
from moe_core.regular_file import read_regular
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
    "hidden_size": ("moe_latent_size", "moe_hidden_size", "routed_expert_hidden_size", "hidden_size"),
    "intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
}
_QUANT_NAMES = ("quantization_config", "compression_config")
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


#: How model types begin whose experts' width has a name of its own: their `intermediate_size` is that of dense layers.
_OWN_WIDTH = (
    *("afmoe", "axk", "bailing", "beam", "deepseek", "dots", "ernie4", "exaone_moe", "flint", "glm", "hy_v", "inkling"),
    *("kimi", "kolibri", "laguna", "lara", "lfm2_moe", "longcat", "mellum", "mimo", "mistral", "muse", "nemotron"),
    *("qwen", "sarvam", "solar", "step3p5", "unlimited", "zaya"),
)


@attrs.frozen(kw_only=True)
class LayerGroup:
    """Layers of a model that ask for the same.

    Attributes:
        layers: Their indices, ascending.
        request: What each of them asks for, without workloads, parallelism or pins.
        draft: They are draft layers, whose indices go on after the model's.
    """

    layers: tuple[int, ...]
    request: LayerRequest
    draft: bool = False


#: Files that tell the quantization where `config.json` does not, and what their content is then called.
QUANT_FILES = {"hf_quant_config.json": "modelopt", "quant_model_description.json": "modelslim"}


def read_config(path: Path) -> dict[str, Any]:
    """The content of a `config.json`, given itself or by the folder it lies in.

    Of a folder, the first of `QUANT_FILES` is read too, and becomes `quantization_config` where the model has none.

    Raises:
        SpecError: No such file, or not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise SpecError(f"no model at {path}: expected a folder with a config.json, or such a file")
    config = _json_object(file)
    beside = next((name for name in QUANT_FILES if path.is_dir() and (path / name).exists()), None)
    if beside and not quantization_of(config):
        config["quantization_config"] = {"quant_method": QUANT_FILES[beside], **_json_object(path / beside)}
    return config


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(file, ENCODING))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"model configuration {file}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise SpecError(f"model configuration {file}: expected a JSON object, got {shown(content)}")
    return content


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
    groups = _groups(config, {layer: experts_module(text, layer) for layer in moe_layers(text)}, dtype, quant)
    if not groups:
        raise SpecError(f"model type {model_type(text)!r}: its configuration makes every layer dense")
    return groups


def draft_layer_groups(
    config: Mapping[str, Any], *, dtype: str | None = None, quant: QuantScheme | LayerQuant | None = None
) -> tuple[LayerGroup, ...]:
    """The draft layers (multi-token prediction) of a model as `layer_groups`; empty without any.

    Their indices go on after the model's layers. Their scheme is their own: an unquantized draft layer beside
    quantized layers is an ordinary request.
    """
    modules = draft_modules(_text_part(config))
    groups = _groups(config, modules, dtype, quant) if modules else ()
    return tuple(attrs.evolve(group, draft=True) for group in groups)


def _groups(
    config: Mapping[str, Any], modules: Mapping[int, str], dtype: str | None, quant: QuantScheme | LayerQuant | None
) -> tuple[LayerGroup, ...]:
    text = _text_part(config)
    # First: a model without experts is told so, whatever else its configuration lacks.
    sizes: dict[int, dict[str, Any]] = {
        layer: {name: _size(text, name, layer) for name in SIZE_NAMES} for layer in modules
    }
    dtype = dtype or _dtype(config, text)
    activation = _activation(text)
    groups: dict[LayerRequest, list[int]] = {}
    for layer, module in modules.items():
        fields: dict[str, Any] = sizes[layer] | _TRAITS.get(model_type(text), {})
        fields["quant"] = quant or _quant(config, module, dtype, activation, fields["num_experts"])
        request = LayerRequest(activation=activation, dtype=dtype, **fields)
        groups.setdefault(request, []).append(layer)
    return tuple(LayerGroup(layers=tuple(layers), request=request) for request, layers in groups.items())


def _quant(
    config: Mapping[str, Any], module: str, dtype: str, activation: ActivationSpec, num_experts: int
) -> LayerQuant:
    quantization = quantization_of(config)
    return read_layer(quantization, module, dtype, gated=activation.gated, num_experts=num_experts).quant


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization of the text part, or of the whole; the expert dtype that some say beside it belongs to it.

    Raises:
        SpecError: There is one that is no mapping.
    """
    text = _text_part(config)
    quantization: Mapping[str, Any] | None = None
    for part, name in ((part, name) for part in (text, config) for name in _QUANT_NAMES):
        found = part.get(name)
        if found is not None and not isinstance(found, Mapping):
            raise SpecError(f"model configuration, {name}: expected fields with values or none, got {shown(found)}")
        quantization = quantization or found
    if quantization and quantization.get("quant_method") == "fp8" and text.get("expert_dtype") is not None:
        return {"expert_dtype": text["expert_dtype"], **quantization}
    return quantization


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
    where = f"model type {model_type(text)!r}, {size}"
    if not present:
        raise SpecError(f"{where}: none of {', '.join(SIZE_NAMES[size])} is in the configuration; is it an MoE model?")
    if size == "num_experts" and len(set(map(str, present.values()))) > 1:
        raise SpecError(f"{where}: the configuration contradicts itself ({present})")
    name, value = next(iter(present.items()))
    if name == "intermediate_size" and model_type(text).startswith(_OWN_WIDTH):
        raise SpecError(f"{where}: no moe_intermediate_size is in the configuration; {name} is that of dense layers")
    if isinstance(value, list):
        if len(value) != text.get("num_hidden_layers"):
            raise SpecError(f"{where}: {name} has {counted(len(value), 'entry', 'entries')}, expected one per layer")
        if layer >= len(value):
            raise SpecError(f"{where}: {name} has no entry for layer {layer}; give its sizes by hand")
        value = value[layer]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{where}: expected {name} to be a whole number >= 1, got {shown(value)}")
    return value


def _activation(text: Mapping[str, Any]) -> ActivationSpec:
    family = model_type(text)
    if family in _GATE_NOT_READ:
        raise SpecError(f"model type {family!r}: its gate cannot be read from the configuration; give sizes by hand")
    if family in _CLAMPED_OAI:
        said = {field: _number(text, f"swiglu_{field}") for field in ("alpha", "limit")}
        numbers: dict[str, Any] = {field: value for field, value in said.items() if value is not None}
        return attrs.evolve(SWIGLU_OAI, row_order=_CLAMPED_OAI[family], **numbers)
    if family in _ALWAYS_SILU:
        return SWIGLU
    name = next((text[key] for key in _ACTIVATION_NAMES if text.get(key)), None)
    if name is None:
        raise SpecError(f"model type {family!r}: none of {', '.join(_ACTIVATION_NAMES)} is in the configuration")
    if not isinstance(name, str) or name not in _KINDS:
        raise UnknownNameError("activation", str(name), _KINDS)
    clamp = {key: value for key, value in text.items() if key.startswith("swiglu_") and value is not None}
    if clamp and (family not in _CLAMPED_SILU or set(clamp) != {"swiglu_limit"}):
        raise SpecError(f"model type {family!r}: it is not known what {', '.join(clamp)} mean here")
    return ActivationSpec(kind=_KINDS[name], gated=family not in _NOT_GATED, limit=_number(text, "swiglu_limit"))


def _number(text: Mapping[str, Any], name: str) -> float | None:
    value = text.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float, NoneType)):
        raise SpecError(f"model type {model_type(text)!r}: expected {name} to be a number, got {shown(value)}")
    return value
