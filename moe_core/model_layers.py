"""Which layers of a model have experts, and what checkpoints call their experts modules.

Rules are a family's own, written in the names of its configuration's keys; what is not in the tables is an error or,
for module names, what nearly all families use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_core.errors import SpecError
from moe_core.json_files import shown

#: Largest number of layers: far above that of the deepest models (some hundred), and looked at within a second.
MOST_LAYERS = 1 << 12

#: What families without an entry below use.
EXPERTS_MODULE = "model.layers.{layer}.mlp.experts"
#: Experts module in the checkpoint -> model types. A larger model's prefix is left out.
EXPERTS_MODULES: dict[str, tuple[str, ...]] = {
    "model.layers.{layer}.block_sparse_moe.experts": (
        "kimi_linear",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl_text",
        "mixtral",
        "phimoe",
    ),
    "model.layers.{layer}.block_sparse_moe": (
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
    ),
    "model.layers.{layer}.feed_forward.experts": ("jamba", "lfm2_moe", "llama4_text"),
    "model.layers.{layer}.mlp": ("jetmoe",),
    "model.layers.{layer}.moe": ("step3p7",),
    "backbone.layers.{layer}.mixer.experts": ("nemotron_h",),
    "layers.{layer}.ffn.experts": ("deepseek_v4",),
    "transformer.blocks.{layer}.ffn.experts.mlp": ("dbrx",),
}
#: Experts module of a draft layer -> model types whose draft layers have experts. `layer` goes on after the last layer,
#: `draft` starts at 0.
DRAFT_MODULES: dict[str, tuple[str, ...]] = {
    "model.layers.{layer}.mlp.experts": (
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe",
        "glm4_moe_lite",
        "glm5_next_text",
        "glm_moe_dsa",
    ),
    "mtp.layers.{draft}.mlp.experts": ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
    "mtp.{draft}.ffn.experts": ("deepseek_v4",),
}
#: Names of the number of draft layers, first present wins.
DRAFT_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def model_type(text: Mapping[str, Any]) -> str:
    """The family of a configuration's text part."""
    return str(text.get("model_type", "?"))


def experts_module(text: Mapping[str, Any], layer: int) -> str:
    """Name of a layer's experts module in the checkpoint; `EXPERTS_MODULE` for families without an entry."""
    name = _of_family(EXPERTS_MODULES, text) or EXPERTS_MODULE
    return name.format(layer=layer)


def draft_modules(text: Mapping[str, Any]) -> dict[int, str]:
    """Indices of the draft layers, which go on after the model's, and their experts modules; empty without any.

    Raises:
        SpecError: There are some, and it is not known where their experts are or whether they have any.
    """
    key = next((name for name in DRAFT_COUNTS if text.get(name) is not None), None)
    count = text[key] if key else 0
    if type(count) is int and count == 0:
        return {}
    name, layers = _of_family(DRAFT_MODULES, text), text.get("num_hidden_layers")
    where = f"model type {model_type(text)!r}, {key} {shown(count)}"
    if name is None:
        known = ", ".join(sorted(family for families in DRAFT_MODULES.values() for family in families))
        raise SpecError(f"{where}: where draft layers of this family have experts is not known; known: {known}")
    if type(count) is not int or not 0 <= count <= MOST_LAYERS or type(layers) is not int:
        expected = f"expected whole numbers up to {MOST_LAYERS}"
        raise SpecError(f"{where}: {expected}, num_hidden_layers is {shown(layers)}")
    return {layers + draft: name.format(layer=layers + draft, draft=draft) for draft in range(count)}


def _of_family(table: Mapping[str, tuple[str, ...]], text: Mapping[str, Any]) -> str | None:
    return next((name for name, families in table.items() if model_type(text) in families), None)


def moe_layers(text: Mapping[str, Any]) -> Sequence[int]:
    """Indices of the layers with experts: those that a list names, else all that the rules let pass.

    Raises:
        SpecError: A key holds something else than its rule expects, or the number of layers is missing.
    """
    where = f"model type {model_type(text)!r}"
    if (listed := text.get("moe_layers")) is not None:
        if not isinstance(listed, list) or not all(type(layer) is int and layer >= 0 for layer in listed):
            raise SpecError(f"{where}: expected moe_layers to be a list of layer indices, got {shown(listed)}")
        return tuple(listed)
    for name, words in _KIND_PER_LAYER.items():
        kinds = _kinds(text, name)
        # Hybrid models whose experts follow another rule list their attention kinds under the same name.
        if kinds and ("dense" in kinds or not words.isdisjoint(kinds)):
            return [layer for layer, kind in enumerate(kinds) if kind in words]
    count = text.get("num_hidden_layers")
    if type(count) is not int or not 1 <= count <= MOST_LAYERS:
        raise SpecError(f"{where}: num_hidden_layers is {shown(count)}, expected 1 to {MOST_LAYERS} layers")
    rules = {name: rule for name, rule in _LAYER_RULES.items() if text.get(name) is not None}
    for name in (*rules, "expert_layer_offset"):
        _require_whole_numbers(text, name)
    try:
        return [layer for layer in range(count) if all(rule(text, layer, count) for rule in rules.values())]
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        values = {name: text[name] for name in rules}
        raise SpecError(f"{where}: which layers have experts is not understood from {values} ({error})") from error


def _kinds(text: Mapping[str, Any], name: str) -> Sequence[str]:
    """A word per layer: a list of words, or letters one after the other."""
    kinds = text.get(name)
    if kinds is None:
        return ()
    letters = name == _LETTERS and isinstance(kinds, str)
    if not letters and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise SpecError(f"model type {model_type(text)!r}: expected {name} to be a word per layer, got {shown(kinds)}")
    return tuple(kinds)


def _require_whole_numbers(text: Mapping[str, Any], name: str) -> None:
    value = text.get(name)
    numbers = value if isinstance(value, list) else () if value is None else (value,)
    if not all(type(number) is int for number in numbers):
        raise SpecError(
            f"model type {model_type(text)!r}: which layers have experts is not understood from {name} {value!r}; "
            "expected a whole number or a list of them"
        )


#: The key whose words are letters of one text.
_LETTERS = "hybrid_override_pattern"
#: Configuration key that gives each layer a word -> the words of layers with experts.
_KIND_PER_LAYER = {
    "mlp_layer_types": {"sparse", "moe", "hash_moe"},
    "layers_block_type": {"moe"},
    _LETTERS: {"E"},
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
