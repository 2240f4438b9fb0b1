"""`quant_method: mxfp4`, the layout of gpt-oss: experts in e2m1 with an exponent per 32, activations left alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.quant.hf.fields import names_in, refuse_unknown
from moe_core.quant.hf.name_list import is_listed
from moe_core.quant.hf.weight import Weight
from moe_core.quant.known import MXFP4_W4A16
from moe_core.quant.stored import StoredScheme

#: What happens on loading.
_HARMLESS = ("dequantize",)


def read_mxfp4(config: Mapping[str, Any], weight: Weight) -> StoredScheme:
    """MXFP4 unless `modules_to_not_convert` names the experts."""
    refuse_unknown(config, weight, ("quant_method", "modules_to_not_convert"), _HARMLESS)
    if is_listed(weight, names_in(config, "modules_to_not_convert", weight=weight)):
        return weight.unquantized()
    return StoredScheme(MXFP4_W4A16, "gpt_oss_mxfp4")
