"""The `quantization_config` of Hugging Face checkpoints, one module per ecosystem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.errors import SpecError
from moe_core.quant.scheme import QuantScheme
from moe_core.quant.stored import StoredScheme


def read_scheme(config: Mapping[str, Any] | None, module_name: str, dtype: str) -> StoredScheme:
    """What one module of a checkpoint is stored as; arguments and errors as `QuantScheme.from_hf`."""
    if not config:
        return StoredScheme(QuantScheme.from_name(dtype))
    method = config.get("quant_method", "?")
    raise SpecError(
        f"quantization_config of {module_name or 'the model'}: quant_method {method!r} is not read by this "
        "version; unquantized checkpoints are. Give the scheme as a value (QuantScheme) instead."
    )
