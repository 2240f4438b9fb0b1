"""`quant_method: gptq` (4 or 8 bits per weight) and `awq` (4): groups along the input, activations left alone.

Sources: the configurations of AutoGPTQ, GPTQModel, AutoAWQ and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.quant.hf.auto_round_scheme import DESCRIBING
from moe_core.quant.hf.fields import look_up, names_in, refuse_unknown, table, text, whole_number
from moe_core.quant.hf.name_list import is_listed, matches, names_all
from moe_core.quant.hf.pattern import expression
from moe_core.quant.hf.quark_export import check_export, check_order
from moe_core.quant.hf.weight import Weight, number_of
from moe_core.quant.scheme import WHOLE
from moe_core.quant.stored import StoredScheme

_USED = (
    "quant_method",
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "sym",
    "zero_point",
    "desc_act",
    "checkpoint_format",
    "format",
    "version",
    "dynamic",
    "modules_to_not_convert",
    "modules_in_block_to_quantize",
    "pack_dtype",
    "is_marlin_format",
    "data_type",
    "export",
    "pack_method",
)
#: How values were found, who wrote them, and which kernels somebody wants; the head of the model.
_HARMLESS = (
    *DESCRIBING,
    "autoround_version",
    "act_group_aware",
    "backend",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "disable_exllama",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "lm_head",
    "max_input_length",
    "meta",
    "method",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_to_fuse",
    "mse",
    "pad_token_id",
    "static_groups",
    "to_quant_block_names",
    "tokenizer",
    "true_sequential",
    "uri",
    "use_cuda_fp16",
    "use_exllama",
)
#: What an entry of `dynamic` may override.
_OVERRIDES = ("bits", "group_size", "sym", "desc_act")
#: Fields that name the layout.
_LAYOUTS = ("checkpoint_format", "format", "version")
_GPTQ_STORAGES = {None: "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2"}
_AWQ_STORAGES = {None: "awq", "gemm": "awq"}


def read_gptq(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    """Symmetric unless `sym` says otherwise; reordered channels (`desc_act`) have no scheme."""
    look_up(config, "export", {None: None}, weight)
    return _read(config, weight, _GPTQ_STORAGES, {4: "int4", 8: "int8"}, zero_point=False)


def read_awq(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    """With zero points unless `zero_point` or `sym` say otherwise; without them AMD's Quark stores two's complement."""
    stored = _read(config, weight, _AWQ_STORAGES, {4: "int4"}, zero_point=True)
    is_signed = check_export(config, weight) and stored.storage == "awq" and not stored.scheme.zero_point
    return StoredScheme(stored.scheme, "quark_int4") if is_signed else stored


def _read(
    config: Mapping[str, Any],
    weight: Weight,
    storages: Mapping[str | None, str],
    dtypes: Mapping[int, str],
    zero_point: bool,
) -> StoredScheme:
    refuse_unknown(config, weight, _USED, _HARMLESS)
    config = {field: value for field, value in config.items() if value is not None}
    if is_listed(weight, names_in(config, "modules_to_not_convert", weight=weight)):
        return weight.unquantized()
    override = _override(config, weight)
    if override is None or not _is_in_block(config, weight):
        return weight.unquantized()
    config = {**config, **override}
    dtype = look_up(config, "bits" if "bits" in config else "w_bit", dtypes, weight)
    group = whole_number(config, "group_size" if "group_size" in config else "q_group_size", weight)
    look_up(config, "data_type", dict.fromkeys((None, "int")), weight)
    look_up(config, "pack_dtype", dict.fromkeys((None, "int32")), weight)
    check_order(config, weight)
    look_up(config, "is_marlin_format", dict.fromkeys((None, False)), weight)
    # One group per output has one scale, in whatever order its channels are.
    if look_up(config, "desc_act", {None: False, False: False, True: True}, weight) and group != WHOLE:
        raise weight.error("desc_act: groups are not of neighbouring channels (g_idx), which has no scheme")
    storage = _storage(config, weight, storages)
    scheme = weight.scheme(
        weight_dtype=dtype,
        weight_block=(1, group),
        weight_scale="fp32",
        zero_point=_has_zero_points(config, weight, zero_point),
    )
    return StoredScheme(scheme, storage)


def _has_zero_points(config: Mapping[str, Any], weight: Weight, default: bool) -> bool:
    """`zero_point` decides before `sym`, which transformers also writes for AWQ and means nothing by it."""
    zero_point = look_up(config, "zero_point", {None: None, True: True, False: False}, weight)
    if zero_point is not None:
        return zero_point
    return look_up(config, "sym", {None: default, True: False, False: True}, weight)


def _override(config: Mapping[str, Any], weight: Weight) -> Mapping[str, Any] | None:
    """What the first pattern of `dynamic` that matches says instead, None if it says not to quantize."""
    patterns = table(config, "dynamic", weight, "patterns with fields") or {}
    for pattern in patterns:
        if not matches(weight, expression(pattern.removeprefix("+:").removeprefix("-:"))):
            continue
        if pattern.startswith("-:"):
            return None
        override = table(patterns, pattern, weight) or {}
        refuse_unknown(override, weight, _OVERRIDES, ())
        return {field: value for field, value in override.items() if value is not None}
    return {}


def _is_in_block(config: Mapping[str, Any], weight: Weight) -> bool:
    """Whether the modules to quantize, lists of names inside a layer, hold the weight; all do without such lists."""
    field = "modules_in_block_to_quantize"
    lists = config.get(field)
    if lists is None:
        return True
    if not isinstance(lists, (list, tuple)) or not lists:
        raise weight.error(f"expected {field} to be a list of names or of lists of names, got {lists!r}")
    inside = [name for names in lists for name in _names(names, field, weight)]
    endings = tuple(f".{name}" for name in inside)
    numbers = {number_of(part) for name in inside for part in name.split(".") if part.isdecimal()}
    every = range(weight.num_experts or 0) if numbers else ()
    return names_all(weight, lambda name: name.endswith(endings), numbers.union(every))


def _names(entry: Any, field: str, weight: Weight) -> tuple[str, ...]:
    """The names of one entry, which is a list of names or one."""
    return names_in({field: [entry] if isinstance(entry, str) else entry}, field, weight=weight)


def _storage(config: Mapping[str, Any], weight: Weight, storages: Mapping[str | None, str]) -> str:
    """The storage of the layout's word; the fields that say it must say the same."""
    words = {field: word for field in _LAYOUTS if (word := text(config, field, weight)) is not None}
    found = {field: look_up({field: word.lower()}, field, storages, weight) for field, word in words.items()}
    if len(set(found.values())) > 1:
        listed = " and ".join(f"{field} {word!r}" for field, word in words.items())
        raise weight.error(f"{listed} contradict each other")
    return next(iter(found.values()), storages[None])
