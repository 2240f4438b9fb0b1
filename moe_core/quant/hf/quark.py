"""`quant_method: quark` (AMD): specifications of tensors for the whole model, for patterns of names, for single layers.

Sources: the configuration and the exporter of AMD Quark, 0.7 to 0.13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from moe_core.quant.hf.fields import agreed, look_up, names_in, refuse_unknown, table, tables
from moe_core.quant.hf.name_list import matches
from moe_core.quant.hf.pattern import expression, wildcards
from moe_core.quant.hf.quark_export import check_export, check_order
from moe_core.quant.hf.quark_specs import read_specs
from moe_core.quant.hf.weight import Weight
from moe_core.quant.stored import StoredScheme

#: What is said of the whole model.
_WHOLE = "global_quant_config"
_USED = (
    "quant_method",
    _WHOLE,
    "layer_type_quant_config",
    "layer_quant_config",
    "exclude",
    "algo_config",
    "export",
)
#: The KV cache and attention, who wrote it, and whether the quantizer worked on modules or a graph.
_HARMLESS = ("kv_cache_quant_config", "kv_cache_post_rope", "quant_mode", "softmax_quant_spec", "version")
_LAYER = ("weight", "input_tensors", "output_tensors", "bias")
_LAYER_HARMLESS = ("target_device",)
#: Algorithms that end in weights and scales.
_ALGORITHMS = ("autoround", "autosmoothquant", "awq", "gptaq", "gptq", "qronos", "smooth")
#: What a rotation may say: it is then part of the weights, or attention's.
_OFFLINE = {"online_r1_rotation": (None, False), "r4": (None, False), "train_smooth": (None, False)}
#: What experts were when their model was quantized, one by one.
_EXPERTS_CLASS = "Linear"


def read_quark(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    """The specifications of the layer or pattern that means the weight, of linear layers, or of all."""
    refuse_unknown(config, weight, _USED, _HARMLESS)
    if _WHOLE not in config:
        # Without it everything would be unquantized, and a misspelt one is not told from none.
        raise weight.error(f"expected {_WHOLE}, null if it is for single layers alone; there is none")
    _check_algorithms(config, weight)
    check_export(config, weight)
    excluded = names_in(config, "exclude", weight=weight)
    if _meant(excluded, dict.fromkeys(excluded), weight):
        return weight.unquantized()
    layer = _layer(config, weight)
    if layer is None:
        return weight.unquantized()
    refuse_unknown(layer, weight, _LAYER, _LAYER_HARMLESS)
    for field in ("output_tensors", "bias"):
        if layer.get(field) is not None:
            raise weight.error(f"{field} of quantized layers are not understood: {layer[field]!r}")
    if layer.get("weight") is None:
        if layer.get("input_tensors") is not None:
            raise weight.error("quantizes activations and not weights, which has no scheme")
        return weight.unquantized()
    stored = read_specs(layer["weight"], layer.get("input_tensors"), weight)
    if stored.scheme.weight_dtype == "int4":
        check_order(config, weight)
    return stored


def _layer(config: Mapping[str, Any], weight: Weight) -> Mapping[str, Any] | None:
    """What is said of the weight, of linear layers where nothing is, or of all; None if nothing is said at all."""
    layers = tables(config, "layer_quant_config", weight, "names with specifications")
    own = agreed(layers, _meant(tuple(layers), layers, weight), "layer_quant_config", weight)
    if own is not None:
        return own  # type: ignore[no-any-return]
    classes = tables(config, "layer_type_quant_config", weight, "classes with specifications")
    return classes.get(_EXPERTS_CLASS) or table(config, _WHOLE, weight, "specifications")


def _meant(names: tuple[str, ...], says: Mapping[str, Any], weight: Weight) -> tuple[str, ...]:
    """The names and patterns that mean the weight; single experts must all be named, and `says` alike of them."""
    plain, patterns = _split(names)
    # Raises where experts are told apart; which names there are is asked below.
    weight.entry(says)
    own = [name for name in (*weight.names, *weight.names_in(0)) if name in plain]
    return (*own, *(pattern for pattern in patterns if _is_match(pattern, weight)))


@lru_cache(maxsize=32)
def _split(names: tuple[str, ...]) -> tuple[frozenset[str], Sequence[str]]:
    """The plain names, of which there may be ten thousands, and the patterns in their order."""
    patterns = [name for name in names if name.startswith("re:") or re.search(r"[*?\[]", name)]
    return frozenset(names).difference(patterns), patterns


def _is_match(pattern: str, weight: Weight) -> bool:
    """Whether a pattern matches the weight's name: wildcards the whole of it, an expression (`re:`) its beginning."""
    is_marked = pattern.startswith("re:")
    return matches(weight, expression(pattern.removeprefix("re:")) if is_marked else wildcards(pattern))


def _check_algorithms(config: Mapping[str, Any], weight: Weight) -> None:
    """Raise `SpecError` for an algorithm that changes how a layer computes."""
    given = config.get("algo_config")
    listed = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    for algorithm in listed:
        if not isinstance(algorithm, Mapping):
            raise weight.error(f"expected algo_config to be algorithms, got {given!r}")
        look_up(algorithm, "name", dict.fromkeys((*_ALGORITHMS, "rotation")), weight)
        if algorithm["name"] == "rotation":
            for field, values in _OFFLINE.items():
                look_up(algorithm, field, dict.fromkeys(values), weight)
