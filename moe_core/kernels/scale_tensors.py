"""Canonical scales and zero points as `StoredLinear` takes them: what a whole row shares multiplies its output."""

from __future__ import annotations

import torch

from moe_core.kernels.number_formats import scale_values
from moe_core.payloads import Tensor
from moe_core.quant import QuantScheme


def scale_tensors(
    name: str, scheme: QuantScheme, tensors: dict[str, Tensor], *, interleaved: bool = False
) -> dict[str, Tensor]:
    """`scale`, `zero_point` and `output_scale` of one projection, as far as it has them.

    Scales per row, per tensor and global ones are one factor per output row, so that gate and up keep their own at no
    cost. Scales inside a row are views of the given ones, everything else is new.

    Args:
        name: `w13` or `w2`.
        scheme: Its scheme.
        tensors: Canonical tensors, among them the projection's.
        interleaved: Whether gate and up rows alternate.
    """
    num_rows = tensors[name].shape[1]
    scale, zero_point = tensors.get(f"{name}_scale"), tensors.get(f"{name}_zero_point")
    factors, found = [tensors.get(f"{name}_global_scale")], {}
    if scheme.scales_whole_rows:
        factors.append(scale)
        if zero_point is not None:
            found["zero_point"] = _by_row(zero_point, num_rows, interleaved)[..., None]
    else:
        if scale is not None:
            # Exponent bytes come in two dtypes; one of them here, or a reload with the other would convert numbers.
            found["scale"] = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
        if zero_point is not None:
            found["zero_point"] = zero_point
    by_row = [_by_row(scale_values(factor), num_rows, interleaved) for factor in factors if factor is not None]
    if by_row:
        found["output_scale"] = torch.stack(by_row).prod(0)
    return found


def _by_row(stored: Tensor, num_rows: int, interleaved: bool) -> Tensor:
    """`[L]`, `[L, 1]`, `[L, 2]` (gate, up) or `[L, num_rows]` -> `[L, num_rows]`: gate and up each keep their own."""
    halves = stored if stored.dim() == 2 else stored[:, None]
    times = num_rows // halves.shape[1]
    return halves.repeat(1, times) if interleaved else halves.repeat_interleave(times, dim=1)
