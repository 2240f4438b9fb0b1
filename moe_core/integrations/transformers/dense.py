"""Everything of a checkpoint besides its quantized experts, as floats: what is stored otherwise is dequantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from moe_core.errors import MoeCoreError, WeightsError
from moe_core.kernels.expert_weights import ExpertLinear
from moe_core.kernels.scale_tensors import scale_tensors
from moe_core.payloads import TORCH_DTYPES, Tensor
from moe_core.quant import QuantScheme
from moe_core.quant.hf import read_scheme
from moe_core.weights.checkpoint import Checkpoint
from moe_core.weights.loading import load_matrix

#: Scales of a quantized key-value cache; the caches here hold floats.
_CACHE_SCALES = ("k_scale", "v_scale")
#: Names of packed weights, which never hold floats.
_PACKED = ("weight_packed", "qweight")
_FLOATS = tuple(TORCH_DTYPES.values())


def read_dense(
    checkpoint: Checkpoint,
    names: Iterable[str],
    quantization: Mapping[str, Any] | None,
    dtype: str,
    progress: Callable[[int], None],
) -> dict[str, Tensor]:
    """The tensors called `names`, by the names that an unquantized checkpoint has for them.

    A matrix that is stored quantized becomes `dtype`; what the scheme says about its inputs is not applied.

    Args:
        checkpoint: Where they are.
        names: Names outside the quantized experts.
        quantization: The configuration that says how they are stored.
        dtype: Word of the model's dtype.
        progress: Called after each matrix or other tensor with the bytes that it took in the checkpoint.

    Raises:
        WeightsError: Lists every quantized matrix whose storage is not understood.
    """
    wanted = [name for name in names if name.rpartition(".")[2] not in _CACHE_SCALES]
    quantized = tuple(sorted({name.rpartition(".")[0] for name in wanted if _is_quantized(checkpoint, name)}))
    inside = {name for name in wanted if name.rpartition(".")[0] in quantized}
    tensors, problems = {}, []
    stored_in = {module: 0 for module in quantized}
    for name in inside:
        if not name.endswith(".bias"):
            stored_in[name.rpartition(".")[0]] += checkpoint.nbytes(name)
    for name in wanted:
        if name not in inside or name.endswith(".bias"):
            tensors[name] = checkpoint.read(name)
            progress(checkpoint.nbytes(name))
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
        progress(stored_in[module])
    if problems:
        title = "quantized tensors outside the experts that are not understood; nothing was loaded:"
        raise WeightsError.listing(f"{checkpoint.path}: {title}", problems)
    return tensors


def dequantize(tensors: dict[str, Tensor], scheme: QuantScheme) -> Tensor:
    """The values `[N, K]` of a matrix as `load_matrix` gives it, in fp32."""
    linear = ExpertLinear.of(scheme, tensors["w2"], **scale_tensors("w2", scheme, tensors))
    out = torch.empty(linear.num_outputs, linear.num_inputs)
    linear.reader(0).read(out, 0)
    return out if linear.output_scale is None else out.mul_(linear.output_scale[0][:, None])


def _is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    suffix = name.rpartition(".")[2]
    return suffix in _PACKED or (suffix == "weight" and checkpoint.dtype(name) not in _FLOATS)
