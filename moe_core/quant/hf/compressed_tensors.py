"""`quant_method: compressed-tensors`: groups of modules, each with arguments for weights and activations.

Source: the configuration classes of the compressed-tensors package, 0.9 to 0.20.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from moe_core.quant.hf.compressed_args import activation_fields, weight_fields
from moe_core.quant.hf.fields import look_up, names_in, refuse_unknown, table, tables, text
from moe_core.quant.hf.name_list import is_listed
from moe_core.quant.hf.weight import Weight
from moe_core.quant.stored import StoredScheme

_USED = (
    "quant_method",
    "config_groups",
    "format",
    "ignore",
    "quantization_status",
    "sparsity_config",
    "transform_config",
    "moe_sparsity_config",
)
#: The KV cache, figures and versions.
_HARMLESS = ("kv_cache_scheme", "global_compression_ratio", "version", "run_compressed")
_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")

#: Format -> (weight dtype, storage).
_FORMATS = {
    "pack-quantized": {"int4": "compressed_tensors_packed", "int8": "compressed_tensors_packed"},
    "int-quantized": {"int4": "scaled", "int8": "scaled"},
    "float-quantized": {"fp8": "scaled"},
    "naive-quantized": {"int8": "scaled", "fp8": "scaled"},
    "mxfp8-quantized": {"fp8": "scaled"},
    "nvfp4-pack-quantized": {"fp4": "compressed_tensors_nvfp4"},
    "mxfp4-pack-quantized": {"fp4": "compressed_tensors_mxfp4"},
}
#: Classes as targets: linear layers are what experts were made of, whichever class holds them now.
_EXPERTS_CLASSES = ("Linear", "LinearBase", "FusedMoE", "MoEGMM")
#: Blocks of checkpoints that transformers' classes, and with them tools that quantize its models, call `mlp`.
_RENAMED_BLOCKS = ("block_sparse_moe", "feed_forward", "ffn")
_OTHER_CLASSES = ("Embedding", "LMHead", "Attention", "Conv1d", "Conv2d", "Conv3d", "LayerNorm", "RMSNorm")


def read_compressed_tensors(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    """The group whose targets name the weight, by name before pattern before class; unquantized without one."""
    refuse_unknown(config, weight, _USED, _HARMLESS)
    look_up(config, "quantization_status", dict.fromkeys((None, "compressed", "frozen")), weight)
    for field in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        value = table(config, field, weight)
        if value and value.get("format") != "dense":
            raise weight.error(f"{field} is not understood and changes numbers: {value!r}")
    called = _as_called(config, weight)
    if is_listed(called, names_in(config, "ignore", weight=weight)):
        return weight.unquantized()
    group = _group_of(config, called)
    if group is None or group.get("weights") is None:
        if group is not None and group.get("input_activations") is not None:
            raise weight.error("quantizes activations and not weights, which has no scheme")
        return weight.unquantized()
    form = text(group, "format", weight)
    return _read_group(group, text(config, "format", weight) if form is None else form, weight)


def _as_called(config: Mapping[str, Any], weight: Weight) -> Weight:
    """The weight by the name that the configuration has for experts, where its block is one of `_RENAMED_BLOCKS`."""
    block = weight.experts.removesuffix(".experts")
    head, _, word = block.rpartition(".")
    if word not in _RENAMED_BLOCKS:
        return weight
    groups = tables(config, "config_groups", weight, "groups of arguments").values()
    lists = [
        names_in(config, "ignore", weight=weight),
        *(names_in(group, "targets", weight=weight) for group in groups),
    ]
    named = "\n".join(entry for entries in lists for entry in entries if "experts" in entry)
    for called in (word, "mlp"):
        if re.search(rf"\b{called}\W+experts", named):
            return attrs.evolve(weight, experts=f"{head}.{called}.experts")
    return weight


def _read_group(group: Mapping[str, Any], form: str | None, weight: Weight) -> StoredScheme:
    refuse_unknown(group, weight, _GROUP, ())
    if group.get("output_activations") is not None:
        raise weight.error(f"output_activations are not understood: {group['output_activations']!r}")
    storages = look_up({"format": form}, "format", _FORMATS, weight)
    scheme = weight.scheme(
        **weight_fields(group["weights"], weight, form == "mxfp8-quantized"),
        **activation_fields(group.get("input_activations"), weight, form == "mxfp8-quantized"),
    )
    if scheme.weight_dtype not in storages or (scheme.global_scale is True) != (form == "nvfp4-pack-quantized"):
        raise weight.error(f"format {form!r} does not hold {scheme}")
    if scheme.zero_point and form != "pack-quantized":
        raise weight.error(f"zero points in format {form!r} are not read")
    return StoredScheme(scheme, storages[scheme.weight_dtype])


def _group_of(config: Mapping[str, Any], weight: Weight) -> Mapping[str, Any] | None:
    """The group with the most telling target; groups that target alike must say the same."""
    groups = tables(config, "config_groups", weight, "groups of arguments")
    if not groups:
        raise weight.error(f"expected config_groups to be groups of arguments, got {config.get('config_groups')!r}")
    ranked: dict[int, dict[str, Mapping[str, Any]]] = {}
    for name, group in groups.items():
        targets = names_in(group, "targets", weight=weight)
        if not targets:
            raise weight.error(f"config_groups {name}: expected targets, got {group.get('targets')!r}")
        rank = _rank(targets, weight)
        if rank is not None:
            ranked.setdefault(rank, {})[name] = group
    if not ranked:
        return None
    best = ranked[min(ranked)]
    first, *others = ({key: group.get(key) for key in _GROUP if key != "targets"} for group in best.values())
    if any(other != first for other in others):
        raise weight.error(f"config_groups {', '.join(best)} target it alike and differ")
    return next(iter(best.values()))


def _rank(targets: Sequence[str], weight: Weight) -> int | None:
    """The most telling target: 0 for a name, 1 for a pattern, 2 for a class, None if all are other modules'."""
    patterns = [target for target in targets if target.startswith("re:")]
    others = [target for target in targets if target not in patterns]
    classes = [target for target in others if "." not in target and target[:1].isupper()]
    for target in classes:
        if target not in _EXPERTS_CLASSES and not target.endswith(_OTHER_CLASSES):
            known = ", ".join(_EXPERTS_CLASSES)
            raise weight.error(f"whether target class {target!r} means experts is not known; known: {known}")
    if is_listed(weight, [target for target in others if target not in classes]):
        return 0
    if is_listed(weight, patterns):
        return 1
    return None if set(classes).isdisjoint(_EXPERTS_CLASSES) else 2
