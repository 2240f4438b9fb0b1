"""`quant_method: auto-round` (Intel): one scheme for the blocks it names, and others for single layers or patterns.

Sources: what AutoRound 0.3 to 0.16 writes and reads. Until 0.4 the packing stood in `backend`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from moe_core.quant.hf.auto_round_scheme import DESCRIBING, FULL_BITS, SCHEME_FIELDS, Layer
from moe_core.quant.hf.fields import agreed, names_in, refuse_unknown, table, whole_number
from moe_core.quant.hf.name_list import is_listed, names_all
from moe_core.quant.hf.pattern import expression, may_hold
from moe_core.quant.hf.weight import Weight
from moe_core.quant.stored import StoredScheme

_USED = (
    "quant_method",
    "packing_format",
    "backend",
    "extra_config",
    "quant_block_list",
    "block_name_to_quantize",
    "to_quant_block_names",
    "modules_to_not_convert",
    "ignored_layers",
    "model_free",
    "autoround_version",
    "fmt",
    "activation_scheme",
    "weight_block_size",
    *SCHEME_FIELDS,
)
#: Where the blocks may stand, the field that counts first.
_BLOCKS = ("quant_block_list", "block_name_to_quantize", "to_quant_block_names")


def read_auto_round(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    """The scheme of the weight's entry in `extra_config`, else of its pattern there, else the model's."""
    refuse_unknown(config, weight, _USED, DESCRIBING)
    if is_listed(weight, names_in(config, "modules_to_not_convert", "ignored_layers", weight=weight)):
        return weight.unquantized()
    own = _own_fields(config, weight)
    if own is None and not _is_in_blocks(config, weight):
        return weight.unquantized()
    refuse_unknown(own or {}, weight, SCHEME_FIELDS, ())
    given = {field: value for field, value in (own or {}).items() if value is not None}
    fields = {**{field: config.get(field) for field in SCHEME_FIELDS}, **given}
    if whole_number(fields, "bits", weight) < FULL_BITS:
        return Layer(fields, config, weight).read()
    if given.get("act_bits") is not None and whole_number(given, "act_bits", weight) < FULL_BITS:
        raise weight.error("quantizes activations and not weights, which has no scheme")
    return weight.unquantized()


def _own_fields(config: Mapping[str, Any], weight: Weight) -> Mapping[str, Any] | None:
    """What `extra_config` says about the weight: by name, else by an expression found in its name."""
    extra = table(config, "extra_config", weight, "layers with fields") or {}
    found = weight.entry(extra)
    if found is None:
        meant = [entry for entry in _expressions(tuple(extra)) if _is_found(entry, weight)]
        found = agreed(extra, meant, "extra_config", weight)
    if found is not None and not isinstance(found, Mapping):
        raise weight.error(f"expected extra_config to be layers with fields, got {found!r}")
    return found


@lru_cache(maxsize=16)
def _expressions(entries: tuple[str, ...]) -> tuple[str, ...]:
    """The entries that are not names of single experts, of which there may be ten thousands."""
    return tuple(entry for entry in entries if not (_is_name(entry) and re.search(r"\bexperts\.\d+\b", entry)))


def _is_name(entry: str) -> bool:
    return re.fullmatch(r"[\w.\-]+", entry) is not None


def _is_found(entry: str, weight: Weight) -> bool:
    """Whether an expression, or a part of a name, is found in the weight's name; alike in all experts."""
    # Most are names of other modules.
    if _is_name(entry) and not may_hold(weight, entry):
        return False
    pattern = expression(entry)
    search = pattern.compiled.search
    return pattern.may_mean(weight) and names_all(weight, lambda name: search(name) is not None, pattern.written)


def _is_in_blocks(config: Mapping[str, Any], weight: Weight) -> bool:
    """Whether the weight's name begins with that of a block; any does where none is named."""
    field = next((field for field in _BLOCKS if config.get(field) is not None), None)
    if field is None or not weight.experts:
        return True
    given = config[field]
    listed = given.split(",") if isinstance(given, str) else given
    if not isinstance(listed, (list, tuple)):
        raise weight.error(f"expected {field} to be names of blocks, got {given!r}")
    names: list[str] = []
    for entry in listed:
        names += names_in({field: [entry] if isinstance(entry, str) else entry}, field, weight=weight)
    return any(module.startswith(name.strip()) for module in weight.modules for name in names)
