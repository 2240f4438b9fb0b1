"""What stored tensors mean: codes, scales, zero points and global scales to float64 values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from moe_core.activation import ActivationSpec
from moe_core.payloads import Tensor
from moe_core.quant import QuantScheme
from moe_core.testing.formats import decode
from moe_core.testing.outcome import NotRun

#: `(name of a projection, stored tensors, its scheme, activation) -> values`, as `stored_values`.
ReadFn: TypeAlias = Callable[[str, dict[str, Tensor], QuantScheme, ActivationSpec], Tensor]


def stored_values(
    name: str,
    tensors: dict[str, Tensor],
    scheme: QuantScheme,
    activation: ActivationSpec,
    read_scale: Callable[[Tensor], Tensor] = torch.clone,
) -> Tensor:
    """Float64 `[E, N, K]` of one projection's stored tensors, as `RawWeights` and `QuantScheme` define them.

    Args:
        name: `w13` or `w2`.
        tensors: The stored tensors.
        scheme: Of the projection.
        activation: Says where gate and up rows lie.
        read_scale: What to make of the scales; another reading of them for a backend that takes them wrongly.
    """
    codes = decode(tensors[name], scheme.weight_dtype)
    if not scheme.is_quantized:
        return codes
    zero = tensors.get(f"{name}_zero_point")
    if zero is not None:
        codes = codes - _spread(zero.double(), codes, scheme, activation)
    scale = read_scale(decode(tensors[f"{name}_scale"], scheme.weight_scale))
    values = codes * _spread(scale, codes, scheme, activation)
    factor = tensors.get(f"{name}_global_scale")
    if factor is not None:
        values = values * _by_half(factor.double().view(codes.shape[0], -1), codes.shape[1], activation)
    return values


def _by_half(factors: Tensor, num_rows: int, activation: ActivationSpec) -> Tensor:
    """`[E, 1]` or `[E, 2]` (gate, up) -> `[E, num_rows, 1]`."""
    index = torch.arange(num_rows)
    both = factors.shape[1] == 2
    half = (index % 2 if activation.row_order == "interleaved" else index * 2 // num_rows) if both else index * 0
    return factors[:, half, None]


def _spread(scale: Tensor, codes: Tensor, scheme: QuantScheme, activation: ActivationSpec) -> Tensor:
    """One factor per scale -> one per code."""
    if not isinstance(scheme.weight_block, tuple):
        raise NotRun(f"{scheme}: no block, so its scales have no meaning")
    if scheme.is_per_tensor:
        return _by_half(scale, codes.shape[1], activation)
    if scheme.scales_whole_rows:
        return scale[..., None]
    across, along = scheme.block_of(codes.shape[1], codes.shape[2])
    rows, columns = torch.arange(codes.shape[1]) // across, torch.arange(codes.shape[2]) // along
    return scale[:, rows][:, :, columns]
