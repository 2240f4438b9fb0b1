"""What a scheme does to activations before a GEMM, in float64: the values that the GEMM then sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from moe_core.payloads import Tensor
from moe_core.quant import PER_TENSOR, WHOLE, QuantScheme
from moe_core.testing.formats import (
    E2M1_MAX,
    E4M3_MAX,
    power_of_two_at_least,
    power_of_two_up_to,
    round_to_e2m1,
    round_to_e4m3,
)
from moe_core.testing.outcome import NotRun

#: `([n, C], the expert of each row) -> [n, C]`.
Rounder = Callable[[Tensor, Sequence[int]], Tensor]

_E2M1_MAX = torch.tensor(E2M1_MAX)
#: Largest code of each activation dtype, to which the largest value of a group is scaled.
LARGEST = {"fp8": E4M3_MAX, "int8": 127.0, "int4": 7.0, "fp4": E2M1_MAX}


def unrounded(rows: Tensor, experts: Sequence[int]) -> Tensor:
    """The `Rounder` of schemes that leave activations alone."""
    return rows


def activation_rounder(scheme: QuantScheme, input_scale: Tensor | None) -> Rounder:
    """The function that shows activations `[n, C]` as a GEMM of `scheme` sees them.

    Args:
        scheme: The scheme of the projection.
        input_scale: `[E]`, the calibrated scale of each expert, for static schemes.

    Raises:
        NotRun: The scheme's rounding depends on the whole batch, so that it has no one answer.
    """
    if scheme.activation_dtype == "same":
        return unrounded
    if scheme.scales_by_batch:
        raise NotRun(f"{scheme}: one activation scale per call depends on how a backend splits the batch")
    factors = torch.ones(1) if input_scale is None else input_scale

    def rounder(rows: Tensor, experts: Sequence[int]) -> Tensor:
        units = factors.double()[list(experts)] if input_scale is not None else factors.double()
        return _round(rows, scheme, units.view(-1, 1, 1))

    return rounder


def _round(rows: Tensor, scheme: QuantScheme, units: Tensor) -> Tensor:
    width = rows.shape[1]
    size = scheme.activation_group
    group = width if size in (WHOLE, PER_TENSOR) else int(size)
    # The last group of a row may be shorter.
    padded = functional.pad(rows, (0, -width % group))
    groups = padded.view(len(rows), padded.shape[1] // group, group)
    scale = _scale(groups, scheme, units)
    codes = _codes(groups / torch.where(scale == 0, 1.0, scale), scheme.activation_dtype)
    return (codes * scale).flatten(1)[:, :width]


def _scale(groups: Tensor, scheme: QuantScheme, units: Tensor) -> Tensor:
    """One scale per group, `[n, groups, 1]`; a static scale alone, or as the unit `[n, 1, 1]` of block scales."""
    largest = groups.abs().amax(-1, keepdim=True)
    if scheme.activation_scaling == "static" and scheme.activation_scale != "e4m3":
        return units.expand_as(largest)
    scale = (largest / LARGEST[scheme.activation_dtype]).float().double()
    if scheme.activation_scale == "e4m3":
        return round_to_e4m3(scale / units) * units
    if scheme.activation_scale == "e8m0":
        powers = power_of_two_at_least(torch.where(scale == 0, 1.0, scale))
        if scheme.activation_dtype == "fp4":
            # OCP MX: the power of two of the largest value over that of the largest code, so that the largest saturate.
            powers = power_of_two_up_to(torch.where(scale == 0, 1.0, largest)) / power_of_two_up_to(_E2M1_MAX)
        return torch.where(scale == 0, 0.0, powers)
    return scale


def _codes(values: Tensor, dtype: str) -> Tensor:
    if dtype == "fp8":
        return round_to_e4m3(values)
    if dtype == "fp4":
        return round_to_e2m1(values)
    largest = LARGEST[dtype]
    return values.round().clamp(-largest - 1, largest)
