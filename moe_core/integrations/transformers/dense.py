"""Everything of a checkpoint besides its quantized experts, as floats: what is stored otherwise is dequantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from moe_core.errors import MoeCoreError, WeightsError
from moe_core.kernels.dequantize import WeightReader, num_columns
from moe_core.payloads import TORCH_DTYPES, Tensor
from moe_core.quant import WHOLE, QuantScheme
from moe_core.quant.hf import read_scheme
from moe_core.weights.checkpoint import Checkpoint
from moe_core.weights.loading import load_matrix

#: Scales of a quantized key-value cache; the caches here hold floats.
_CACHE_SCALES = ("k_scale", "v_scale")
#: Names of packed weights, which never hold floats.
_PACKED = ("weight_packed", "qweight")
_FLOATS = tuple(TORCH_DTYPES.values())
_WHOLE_ROWS = ((1, WHOLE), (WHOLE, WHOLE))


def read_dense(
    checkpoint: Checkpoint,
    names: Iterable[str],
    quantization: Mapping[str, Any] | None,
    dtype: str,
    progress: Callable[[], None],
) -> dict[str, Tensor]:
    """The tensors called `names`, by the names that an unquantized checkpoint has for them.

    A matrix that is stored quantized becomes `dtype`; what the scheme says about its inputs is not applied.

    Args:
        checkpoint: Where they are.
        names: Names outside the quantized experts.
        quantization: The configuration that says how they are stored.
        dtype: Word of the model's dtype.
        progress: Called after each tensor.

    Raises:
        WeightsError: Lists every quantized matrix whose storage is not understood.
    """
    wanted = [name for name in names if name.rpartition(".")[2] not in _CACHE_SCALES]
    quantized = tuple(sorted({name.rpartition(".")[0] for name in wanted if _is_quantized(checkpoint, name)}))
    inside = {name for name in wanted if name.rpartition(".")[0] in quantized}
    tensors, problems = {}, []
    for name in wanted:
        if name not in inside or name.endswith(".bias"):
            tensors[name] = checkpoint.read(name)
            progress()
    for module in quantized:
        try:
            stored = read_scheme(quantization, module, dtype)
            if not stored.scheme.is_quantized:
                raise WeightsError(f"{module}: its weight holds no floats, and the configuration leaves it unquantized")
            values = dequantize(load_matrix(checkpoint, module, stored), stored.scheme)
        except MoeCoreError as error:
            listed = ", ".join(name for name in sorted(inside) if name.startswith(f"{module}."))
            problems.append(f"{listed}: {error}")
            continue
        tensors[f"{module}.weight"] = values.to(TORCH_DTYPES[dtype])
        progress()
    if problems:
        title = "quantized tensors outside the experts that are not understood; nothing was loaded:"
        raise WeightsError("\n  ".join([f"{checkpoint.path}: {title}", *problems]))
    return tensors


def dequantize(tensors: dict[str, Tensor], scheme: QuantScheme) -> Tensor:
    """The values `[N, K]` of a matrix as `load_matrix` gives it, in fp32."""
    block = scheme.weight_block
    scale, zero_point = tensors.get("w2_scale"), tensors.get("w2_zero_point")
    if block in _WHOLE_ROWS:
        scale, zero_point = (None if stored is None else stored[..., None] for stored in (scale, zero_point))
    scale, zero_point = (None if stored is None else stored[0] for stored in (scale, zero_point))
    weight, tile = tensors["w2"][0], block if isinstance(block, tuple) else (1, WHOLE)
    out = torch.empty(weight.shape[0], num_columns(weight, scheme.weight_dtype))
    WeightReader.of(weight, scheme.weight_dtype, tile, scale, zero_point).read(out, 0)
    return out.mul_(tensors["w2_global_scale"]) if scheme.global_scale else out


def _is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    suffix = name.rpartition(".")[2]
    return suffix in _PACKED or (suffix == "weight" and checkpoint.dtype(name) not in _FLOATS)
