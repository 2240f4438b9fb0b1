"""Activations as a quantized GEMM sees them: the numbers that their codes stand for.

A scheme says four things of activations (dtype, scaling, group, type of the scale); each has its rule here, so that
schemes without a name are computed too. Codes themselves, for GEMMs that read them, are made in `quantize`.
"""

from __future__ import annotations

import attrs
import torch
from torch.nn import functional

from moe_core.errors import InputError
from moe_core.kernels.number_formats import (
    LARGEST_CODE,
    power_of_two_above,
    power_of_two_below,
    quotient,
    round_e2m1,
    round_to_e4m3,
)
from moe_core.payloads import Tensor
from moe_core.quant import PER_TENSOR, QuantScheme


@attrs.frozen(kw_only=True)
class ActivationRounder:
    """How activations are rounded before a GEMM.

    A dynamic scale is amax / largest code in fp32: of a token, of a group of its channels, or of all rows. As e8m0 it
    becomes a power of two before anything is rounded: the next above, for fp4 that of the largest code's exponent
    (OCP MX). Statically scaled values of a row share the fp32 `input_scale` of its expert; NVFP4 gives every group an
    e4m3 scale = amax / 6 / input_scale besides. Codes are rounded to nearest, ties to even, and saturate. Zeros stay
    zeros.

    Attributes:
        dtype: Word of the codes, `same` for none.
        static: Whether the scale comes from the checkpoint.
        group: Channels that share a scale, `WHOLE` one per token, `PER_TENSOR` one for all rows.
        scale: Word of the scales.
        needs_real_rows: Whether a row's result depends on other rows, so that undefined ones must be known.
    """

    dtype: str
    static: bool
    group: int
    scale: str
    needs_real_rows: bool

    @classmethod
    def of(cls, scheme: QuantScheme) -> ActivationRounder:
        """What `scheme` does to activations."""
        return cls(
            dtype=scheme.activation_dtype,
            static=scheme.activation_scaling == "static",
            group=int(scheme.activation_group),
            scale=scheme.activation_scale,
            needs_real_rows=scheme.scales_by_batch,
        )

    def weighted(self, rows: Tensor, weights: Tensor) -> Tensor:
        """`rows [R, C]` times fp32 `weights [R, 1]`, in the dtype in which they are rounded once by `__call__`."""
        if self.dtype == "same":
            return (rows * weights).to(rows.dtype)
        return (rows.double() if self._divides_exactly(rows) else rows) * weights

    def __call__(
        self, x: Tensor, input_scale: Tensor | None = None, is_real: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Round `x [rows, C]` of any float dtype.

        Args:
            x: The activations; of codes that are those of exact division fp64 is taken as it is.
            input_scale: fp32 of static scaling, `[rows, 1]` or a scalar.
            is_real: bool `[rows]`, where `needs_real_rows`; None for all.

        Returns:
            fp32 values, and what multiplies a GEMM's results for them: `[rows, 1]`, a scalar, or None (the values are
            already scaled). With dtype `same`, `x` itself.

        Raises:
            InputError: Static scaling without `input_scale`.
        """
        if self.dtype == "same":
            return x, None
        values = x.double() if self._divides_exactly(x) else x.float()
        fixed = self._fixed_scale(input_scale)
        if self.group > 0 and (fixed is None or self.scale == "e4m3"):
            return self._round_groups(values, fixed), None
        scale = self._dynamic_scale(self._amax(values.abs(), is_real)) if fixed is None else fixed
        return self._codes(values, scale), scale

    def _divides_exactly(self, values: Tensor) -> bool:
        """Whether codes are those of quotients in fp64.

        In fp32, a product with a router weight or a quotient may be a tie where the exact one is none, and the other
        way round; of so few codes each counts.
        """
        return self.dtype == "int4" and values.device.type == "cpu"

    def _fixed_scale(self, input_scale: Tensor | None) -> Tensor | None:
        if not self.static:
            return None
        if input_scale is None:
            raise InputError(f"statically scaled {self.dtype} activations need input_scale, got None")
        return input_scale

    def _amax(self, sizes: Tensor, is_real: Tensor | None) -> Tensor:
        if self.group != PER_TENSOR:
            return sizes.amax(-1, keepdim=True)
        real = sizes if is_real is None else torch.where(is_real[:, None], sizes, 0.0)
        # One zero more: there may be no row.
        return functional.pad(real.amax(-1), (0, 1)).amax()

    def _round_groups(self, values: Tensor, input_scale: Tensor | None) -> Tensor:
        """Rounded and scaled back, since the results of a GEMM cannot be scaled by group."""
        groups = in_groups(values, self.group)
        amax = groups.abs().amax(-1, keepdim=True)
        if input_scale is None:
            scale = self._dynamic_scale(amax)
        else:
            by_group = input_scale[..., None]
            # A group's scale may round to zero; its values are then zero.
            scale = round_to_e4m3(self._full_scale(amax) / by_group) * by_group
        return torch.flatten(self._codes(groups, scale).mul_(scale), start_dim=1)[:, : values.shape[1]]

    def _full_scale(self, amax: Tensor) -> Tensor:
        """The fp32 scale with which the largest value gets the largest code."""
        return quotient(amax, LARGEST_CODE[self.dtype]).float()

    def _dynamic_scale(self, amax: Tensor) -> Tensor:
        if self.scale == "e8m0" and self.dtype == "fp4":
            # The exponent of the largest e2m1 value is 2.
            return power_of_two_below(amax) * 0.25
        scale = self._full_scale(amax)
        if self.scale == "e8m0":
            return power_of_two_above(scale)
        if self.scale == "e4m3":
            return round_to_e4m3(scale)
        return scale.bfloat16().float() if self.scale == "bf16" else scale

    def _codes(self, values: Tensor, scale: Tensor) -> Tensor:
        # Any divisor gives zeros where the scale is zero.
        divisor = torch.where(scale == 0, 1.0, scale)
        if self.dtype == "fp8":
            return round_to_e4m3(values / divisor)
        if self.dtype == "fp4":
            return round_e2m1(values / divisor)
        largest = LARGEST_CODE[self.dtype]
        return (values / divisor).round_().clamp_(-largest - 1.0, largest).float()


def in_groups(values: Tensor, group: int) -> Tensor:
    """`[rows, ceil(C / group), group]`; what the last group lacks is zero."""
    padded = functional.pad(values, (0, -values.shape[1] % group))
    # Counted, since without rows torch cannot infer a size.
    return padded.view(padded.shape[0], padded.shape[1] // group, group)
