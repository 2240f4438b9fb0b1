"""Float weights to codes and scales, one function per number format; every rounding is exact.

Weights are `[N, K]`, output x input. All arithmetic is in float64: the quotient of a weight of at most 24 bits and a
scale of at most 24 bits is then never rounded onto a tie that it is not, so the codes are those of exact arithmetic.
Rounding is to nearest, ties to even. Scales follow the largest magnitude of their block and always multiply; a block of
zeros gets codes 0. The last block of an axis may be smaller.

Formats: e4m3 is float8_e4m3fn, whose largest value is 448; e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, as
four-bit codes with the sign on top) and e8m0 (a byte b for 2^(b - 127)) as in OCP Microscaling v1.0.
"""

from __future__ import annotations

import attrs
import torch

from moe_core.kernels.number_formats import E2M1_MAX, E4M3_MAX
from moe_core.payloads import Tensor

#: What the largest weight is scaled to by an NVFP4 global scale: the largest code times the largest block scale.
NVFP4_MAX = E4M3_MAX * E2M1_MAX
NVFP4_GROUP = 16
MX_GROUP = 32

_E8M0_BIAS = 127


@attrs.frozen(eq=False)
class Quantized:
    """Codes of one weight and the scales of their blocks.

    Attributes:
        codes: `[N, K]`: int8, float8_e4m3fn, or uint8 holding one four-bit code each.
        scale: `[N / block rows, K / block columns]`, rounded up: fp32, float8_e4m3fn, or exponent bytes (uint8).
    """

    codes: Tensor
    scale: Tensor


def quantize_int(weight: Tensor, bits: int) -> Quantized:
    """Symmetric integers of `bits` bits with an fp32 scale, amax / (2^(bits - 1) - 1), per row.

    The lowest code is never used: largest magnitudes are equal on both sides. Codes are int8 whatever `bits` says.
    """
    largest = 2 ** (bits - 1) - 1
    columns = weight.shape[1]
    scale = _positive((_amax(weight, 1, columns) / largest).float())
    codes = (weight.double() / _spread(scale, weight, 1, columns)).round().clamp(-largest - 1, largest)
    return Quantized(codes.to(torch.int8), scale)


def quantize_fp8_tiles(weight: Tensor, rows: int, columns: int) -> Quantized:
    """e4m3 with an fp32 scale, amax / 448, per tile of `rows` x `columns`."""
    scale = _positive((_amax(weight, rows, columns) / E4M3_MAX).float())
    return Quantized(_to_e4m3(weight.double() / _spread(scale, weight, rows, columns)), scale)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """The fp32 multiplier amax / 2688 of a tensor (or of several that share it) whose largest magnitude is `amax`."""
    return _positive((amax.double() / NVFP4_MAX).float())


def quantize_nvfp4(weight: Tensor, global_scale: Tensor, *, divides: bool = False) -> Quantized:
    """e2m1 with an e4m3 scale per 16 columns, besides one global scale.

    Args:
        weight: `[N, K]`.
        global_scale: fp32 scalar, see `nvfp4_global_scale`.
        divides: The global scale divides instead of multiplying: a value is code * scale / global_scale.

    A block far below the largest weight may get the scale 0, and is then zero.
    """
    amax, factor = _amax(weight, 1, NVFP4_GROUP), global_scale.double()
    scale = _to_e4m3(amax * factor / E2M1_MAX if divides else amax / (E2M1_MAX * factor))
    block = scale.double() / factor if divides else scale.double() * factor
    unit = _spread(block, weight, 1, NVFP4_GROUP)
    codes = _to_e2m1(torch.where(unit > 0, weight.double() / unit, 0.0))
    return Quantized(codes, scale)


def quantize_mxfp4(weight: Tensor) -> Quantized:
    """e2m1 with an exponent byte per 32 columns: floor(log2(amax)) - 2, so the largest magnitudes may saturate at 6."""
    amax = _amax(weight, 1, MX_GROUP)
    exponent = torch.where(amax > 0, _floor_log2(amax) - 2, -_E8M0_BIAS).clamp(-_E8M0_BIAS, _E8M0_BIAS)
    codes = _to_e2m1(weight.double() / _spread(_power_of_two(exponent), weight, 1, MX_GROUP))
    return Quantized(codes, (exponent + _E8M0_BIAS).to(torch.uint8))


def _amax(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Largest magnitude of each block, float64 `[ceil(N / rows), ceil(K / columns)]`."""
    padded = torch.nn.functional.pad(weight.abs(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    down, across = padded.shape[0] // rows, padded.shape[1] // columns
    return padded.reshape(down, rows, across, columns).amax((1, 3)).double()


def _spread(scale: Tensor, weight: Tensor, rows: int, columns: int) -> Tensor:
    """The scale of every element, float64 `[N, K]`."""
    down = scale.double().repeat_interleave(rows, 0)[: weight.shape[0]]
    return down.repeat_interleave(columns, 1)[:, : weight.shape[1]]


def _positive(scale: Tensor) -> Tensor:
    """A block of zeros is divided by 1."""
    return torch.where(scale > 0, scale, 1.0)


def _floor_log2(values: Tensor) -> Tensor:
    # frexp's fraction lies in [0.5, 1).
    return torch.frexp(values).exponent.long() - 1


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent exactly, for normal float64: made of its bits."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _round_float(values: Tensor, fraction_bits: int, smallest_exponent: int, largest: float) -> Tensor:
    """Nearest number with so many fraction bits, ties to even, with gradual underflow, saturating."""
    step = _power_of_two(_floor_log2(values.abs()).clamp(min=smallest_exponent) - fraction_bits)
    return ((values / step).round() * step).clamp(-largest, largest)


def _to_e4m3(values: Tensor) -> Tensor:
    # torch alone would round twice: to fp32, and then onto ties that were none.
    return _round_float(values, 3, -6, E4M3_MAX).to(torch.float8_e4m3fn)


def _to_e2m1(values: Tensor) -> Tensor:
    rounded = _round_float(values, 1, 0, E2M1_MAX)
    size = rounded.abs()
    # Codes count up in steps of 0.5 below 2, of 1 below 4, and of 2 above.
    magnitude = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
    # The sign of a value that became zero is kept.
    return (magnitude + 8 * rounded.signbit()).to(torch.uint8)
