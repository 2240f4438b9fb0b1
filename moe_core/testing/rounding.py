"""What a scheme does to activations before a GEMM, in float64: the values that the GEMM then sees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
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

_E2M1_MAX = torch.tensor(E2M1_MAX)
#: Largest code of each activation dtype, to which the largest value of a group is scaled.
LARGEST = {"fp8": E4M3_MAX, "int8": 127.0, "int4": 7.0, "fp4": E2M1_MAX}


@attrs.frozen(eq=False)
class Rounder:
    """What a GEMM of one scheme sees of activations.

    Attributes:
        scheme: The scheme of the projection, None for activations that are left alone.
        input_scale: `[E]`, the calibrated scale of each expert, for static schemes.
    """

    scheme: QuantScheme | None = None
    input_scale: Tensor | None = None

    def __call__(self, rows: Tensor, experts: Sequence[int]) -> Tensor:
        """Rows `[n, C]` and the expert of each -> the values that the GEMM sees, `[n, C]`."""
        if self.scheme is None:
            return rows
        groups, units = _grouped(rows, self.scheme), self._units(experts)
        scale = _scale(groups.abs().amax(-1, keepdim=True), self.scheme, units)
        return _values(groups, scale, self.scheme).flatten(1)[:, : rows.shape[1]]

    def doubts(self, rows: Tensor, experts: Sequence[int], reach: Tensor) -> tuple[Tensor, Tensor]:
        """How far down and up each rounded value `[n, C]` may move if the one before is off by up to `reach [n, C]`.

        Zero for most: only values near the middle between two codes, and groups whose scale is nearly another, come out
        otherwise. Values that are not rounded to codes have no doubts: they move with what is before them.
        """
        if self.scheme is None:
            return torch.zeros_like(rows), torch.zeros_like(rows)
        scheme, units = self.scheme, self._units(experts)
        groups, reaches = _grouped(rows, scheme), _grouped(reach, scheme)
        largest = groups.abs().amax(-1, keepdim=True)
        most, least = ((groups.abs() + sign * reaches).clamp(min=0).amax(-1, keepdim=True) for sign in (1, -1))
        scales = [_scale(values, scheme, units) for values in (largest, least, most)]
        right = _values(groups, scales[0], scheme)
        if scheme.activation_scale == "fp32" and scheme.activation_scaling == "dynamic":
            # Such a scale follows its group, and moves every value against its code a little.
            reaches = reaches + groups.abs() * ((most - least) / 2 / torch.where(largest == 0, 1.0, largest))
            scales = scales[:1]
        moves = torch.stack(
            [
                _values(groups + sign * reaches, scale, scheme) - right
                for scale, sign in itertools.product(scales, (-1, 0, 1))
            ]
        )
        width = rows.shape[1]
        return moves.amin(0).flatten(1)[:, :width], moves.amax(0).flatten(1)[:, :width]

    def _units(self, experts: Sequence[int]) -> Tensor:
        """`[n, 1, 1]`, or one for all."""
        if self.input_scale is None:
            return torch.ones(1, 1, 1, dtype=torch.float64)
        return self.input_scale.double()[list(experts)].view(-1, 1, 1)


#: The rounder of schemes that leave activations alone.
unrounded = Rounder()


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
    return Rounder(scheme, input_scale)


def _grouped(rows: Tensor, scheme: QuantScheme) -> Tensor:
    """`[n, C]` -> `[n, groups, values of one scale]`; the last group of a row may be shorter, and is filled up."""
    width, size = rows.shape[1], scheme.activation_group
    group = width if size in (WHOLE, PER_TENSOR) else int(size)
    padded = functional.pad(rows, (0, -width % group))
    return padded.view(len(rows), padded.shape[1] // group, group)


def _values(groups: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    return _codes(groups / torch.where(scale == 0, 1.0, scale), scheme.activation_dtype) * scale


def _scale(largest: Tensor, scheme: QuantScheme, units: Tensor) -> Tensor:
    """One scale per group from its largest value `[n, groups, 1]`.

    A static scale stands alone, or is the unit `[n, 1, 1]` of block scales.
    """
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
