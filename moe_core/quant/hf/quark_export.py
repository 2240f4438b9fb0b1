"""What Quark says of its export, also beside the `quant_method` of other tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.quant.hf.fields import look_up, refuse_unknown, table
from moe_core.quant.hf.weight import Weight

_USED = ("pack_method", "weight_format")
#: The KV cache, and layers whose scales were made equal.
_HARMLESS = ("kv_cache_group", "min_kv_scale", "weight_merge_groups")


def check_export(config: Mapping[str, Any], weight: Weight) -> bool:
    """Whether Quark wrote the checkpoint, as far as `export` tells; raises `SpecError` if weights are not quantized."""
    export = table(config, "export", weight)
    if export is None:
        return False
    refuse_unknown(export, weight, _USED, _HARMLESS)
    look_up(export, "weight_format", dict.fromkeys((None, "real_quantized")), weight)
    return True


def check_order(config: Mapping[str, Any], weight: Weight) -> None:
    """Raise `SpecError` if words hold 4-bit values in another order than AWQ's."""
    for fields in (config, table(config, "export", weight) or {}):
        look_up(fields, "pack_method", dict.fromkeys((None, "reorder")), weight)
