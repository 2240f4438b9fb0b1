"""FP8 weights with any scales, again with scales that are powers of two: for users with tensors in memory.

For kernels that take e8m0 scales alone. It loses a little: the weights are rounded a second time, so it is for runners
to ask for and never done twice.
"""

from __future__ import annotations

import torch

from moe_core.errors import WeightsError
from moe_core.kernels.number_formats import E4M3_MAX, power_of_two_above
from moe_core.payloads import Tensor
from moe_core.quant import LayerQuant, QuantScheme
from moe_core.weights.codes import exponent_bytes

#: A block of zeros has this scale, and none a smaller one: its inverse is finite too.
_LEAST_SCALE = 2.0**-126


def to_ue8m0(tensors: dict[str, Tensor], quant: LayerQuant) -> dict[str, Tensor]:
    """Canonical tensors of FP8 block weights with power-of-two scales.

    For each block: the weights are multiplied out in fp32, the scale is the power of two at or above `amax / 448`, and
    the weights are rounded to e4m3 **with that scale**. No bf16 lies between: all values of one code share their
    fraction, so that rounding twice moves every value of some codes to a neighbour (up to 7 % of a layer's output).

    Args:
        tensors: Canonical tensors with fp32 scales; they are not changed.
        quant: The schemes, with the blocks in which these scales are (`request.local_quant`).

    Returns:
        New weights and scales (exponent bytes, uint8, of the same shapes) of both projections; other tensors as given.

    Raises:
        WeightsError: A projection that is not FP8 in blocks with fp32 scales; also one that was converted before, and
            one with values that are NaN or beyond fp32, which would make zeros of a block's others.
    """
    converted = dict(tensors)
    for name, scheme in (("w13", quant.w13), ("w2", quant.w2)):
        rows, columns = _block(name, scheme, tensors)
        weight, scale = tensors[name], tensors[f"{name}_scale"]
        codes, exponents = torch.empty_like(weight), torch.empty_like(scale, dtype=torch.uint8)
        for expert in range(weight.shape[0]):
            try:
                codes[expert], exponents[expert] = requantize_blocks(weight[expert], scale[expert], rows, columns)
            except WeightsError as error:
                raise WeightsError(f"{name}, expert {expert}: {error}") from error
        converted |= {name: codes, f"{name}_scale": exponents}
    return converted


def requantize_blocks(weight: Tensor, scale: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """One matrix of e4m3 with new scales.

    Args:
        weight: `[N, K]` e4m3.
        scale: `[ceil(N / rows), ceil(K / columns)]` fp32.
        rows: Rows of a block.
        columns: Its columns.

    Returns:
        e4m3 `[N, K]`, and exponent bytes of the shape of `scale`.

    Raises:
        WeightsError: A block's values are not finite in fp32.
    """
    height, width = weight.shape
    (down, across), padding = scale.shape, (0, -width % columns, 0, -height % rows)
    blocks = torch.nn.functional.pad(weight.float(), padding).view(down, rows, across, columns)
    values = blocks * scale[:, None, :, None]
    factor = power_of_two_above(values.abs().amax((1, 3)) / E4M3_MAX).clamp(min=_LEAST_SCALE)
    exponents, are_finite = exponent_bytes(factor)
    if not are_finite:
        down_at, across_at = (int(place) for place in factor.isinf().nonzero()[0])
        raise WeightsError(
            f"block {down_at}, {across_at} with scale {float(scale[down_at, across_at]):g}: its values are not finite"
        )
    codes = (values * (1.0 / factor)[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(down * rows, across * columns)[:height, :width], exponents


def _block(name: str, scheme: QuantScheme, tensors: dict[str, Tensor]) -> tuple[int, int]:
    block = scheme.weight_block
    is_fp8_block = scheme.weight_dtype == "fp8" and isinstance(block, tuple) and min(block) > 0
    scale = tensors.get(f"{name}_scale")
    if not is_fp8_block or not isinstance(block, tuple) or scale is None or scale.dtype != torch.float32:
        found = "none" if scale is None else str(scale.dtype).removeprefix("torch.")
        raise WeightsError(
            f"{name}: only FP8 weights in blocks with fp32 scales are converted, got {scheme} with scales of {found}"
        )
    return block
