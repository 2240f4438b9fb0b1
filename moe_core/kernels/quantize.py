"""`ops.quantize` in torch: rows as codes and scales, in the layouts that grouped GEMMs of 8 bits read."""

from __future__ import annotations

import torch

from moe_core.activation import ActivationSpec
from moe_core.kernels.activation import activation_function
from moe_core.kernels.activation_rounding import in_groups
from moe_core.kernels.number_formats import LARGEST_CODE, power_of_two_above, quotient, round_e4m3
from moe_core.kernels.real_rows import real_rows
from moe_core.kernels.scale_layouts import CODE_DTYPES, PACKED_SCALES, code_format
from moe_core.payloads import Tensor
from moe_core.specs import TokenDtype

#: Largest code of each dtype that codes are stored in.
CODE_MAX = {dtype: LARGEST_CODE[word] for word, dtype in CODE_DTYPES.items()}
#: Smallest code of each dtype; only values that a static scale does not cover get that of integers.
CODE_MIN = {dtype: -largest - (0.0 if dtype.is_floating_point else 1.0) for dtype, largest in CODE_MAX.items()}


def quantize(
    rows: Tensor, token_dtype: TokenDtype, *, activation: ActivationSpec | None = None, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `ops.quantize`."""
    dtype, layout = code_format(token_dtype)
    width = rows.shape[-1] // (1 if activation is None else activation.rows_per_channel)
    flat, index = rows.reshape(-1, rows.shape[-1]), real_rows(rows, real)
    values = (flat if index is None else flat[index]).float()
    if activation is not None:
        values = activation_function(activation)(values)
    groups = in_groups(values, layout.group or max(1, width))
    scale = quotient(groups.abs().amax(-1), CODE_MAX[dtype])
    if layout.packed:
        scale = power_of_two_above(scale)
    # Any divisor gives zeros where the scale is zero.
    scaled = groups / torch.where(scale == 0, 1.0, scale)[..., None]
    codes = torch.flatten(_rounded(scaled, dtype), start_dim=1)[:, :width]
    scales = layout.empty(rows.shape[:-1], width, rows.device)
    written = (_packed(scale) if layout.packed else scale).view(-1, scales.shape[-1])
    if index is None:
        out = codes.contiguous()
        scales.copy_(written.view(scales.shape))
    else:
        out = codes.new_empty((flat.shape[0], width))
        # Not every device copies small floats by index.
        out.view(torch.int8)[index] = codes.view(torch.int8)
        place = (index // rows.shape[1], index % rows.shape[1]) if rows.dim() == 3 else (index,)
        scales[place] = written
    by_row = token_dtype.scales == "token"
    return out.view(*rows.shape[:-1], width), scales[..., 0] if by_row else scales


def _rounded(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float8_e4m3fn:
        return round_e4m3(scaled)
    # NaN is in the scale; as an integer it would be anything.
    return scaled.nan_to_num_().round_().clamp_(CODE_MIN[dtype], CODE_MAX[dtype]).to(dtype)


def _packed(scale: Tensor) -> Tensor:
    """Exponents of powers of two `[rows, G]` -> int32 `[rows, ceil(G / 4)]`, the first in the low byte."""
    exponents = in_groups(scale.view(torch.int32) >> 23, PACKED_SCALES)
    shifts = torch.arange(0, 8 * PACKED_SCALES, 8, device=scale.device, dtype=torch.int32)
    # Bytes do not overlap, so that the sum (which wraps in the last one) is their union.
    return (exponents << shifts).sum(-1, dtype=torch.int32)
