"""Stored weights to floats, and activations to the values that a quantized GEMM would see.

One table entry per scheme. Number formats: `moe_core.quant`; e2m1 and e8m0 as in OCP Microscaling v1.0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_core.errors import InputError, UnknownNameError
from moe_core.kernels.schemes import FLOAT_SCHEMES, SUPPORTED_SCHEMES
from moe_core.payloads import Tensor
from moe_core.quant import FP8_BLOCK128, MXFP4_W4A16, NVFP4, NVFP4_W4A16, W8A8_INT8, QuantScheme

#: `(weight rows, their scales, fp32 output) -> None`; rows are independent, so a part of an expert may be given.
_Reader = Callable[[Tensor, Tensor, Tensor], None]

#: `(x [rows, C], input_scale or None) -> [rows, C]`.
ActivationRounder = Callable[[Tensor, Tensor | None], Tensor]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: Both values of every packed byte, low nibble first.
_E2M1_PAIRS = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)], dtype=torch.float32)
_INT8_MAX = 127.0
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
_NVFP4_GROUP = 16
_MX_GROUP = 32
_FP8_GROUP = 128


def dequantize(
    weight: Tensor, scale: Tensor | None, scheme: QuantScheme, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of one expert's stored weight, or of some of its rows.

    Args:
        weight: `[N, C]` in the stored form of `scheme` (fp4: uint8 `[N, C / 2]`, element 2i in the low nibble).
        scale: int8: `[N]` or `[N, 1]`; fp4: `[N, C / group]`, exponent bytes (uint8 or float8_e8m0fnu) for MXFP4 and
            float8_e4m3fn for NVFP4, whose global scale the caller multiplies; fp8: `[N, ceil(C / 128)]` fp32, the
            tile's scale repeated for each row; None for floats.
        scheme: One of `SUPPORTED_SCHEMES`.
        dtype: Floating dtype of the result; the product with the scale is made in fp32 and rounded once.

    Returns:
        `[N, C]` of `dtype`.

    Raises:
        UnknownNameError: The scheme has no entry.
        InputError: A quantized weight comes without scales.
    """
    packed = 2 if scheme.weight_dtype == "fp4" else 1
    values = weight.new_empty((weight.shape[0], weight.shape[1] * packed), dtype=torch.float32)
    dequantize_into(values, weight, scale, scheme)
    return values.to(dtype)


def dequantize_into(out: Tensor, weight: Tensor, scale: Tensor | None, scheme: QuantScheme) -> None:
    """As `dequantize`, into fp32 memory `out [N, C]` of any strides."""
    if scheme in FLOAT_SCHEMES:
        out.copy_(weight)
        return
    reader = _READERS.get(scheme)
    if reader is None:
        raise UnknownNameError("quantization scheme", scheme.label, (s.label for s in SUPPORTED_SCHEMES))
    if scale is None:
        raise InputError(f"weights of scheme {scheme.label} need scales, got None")
    reader(weight, scale, out)


def _read_int8_per_channel(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    out.copy_(weight).mul_(scale.reshape(-1, 1))


def _read_e2m1(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    pairs = _E2M1_PAIRS.to(weight.device)
    values = torch.nn.functional.embedding(weight.int(), pairs).view(out.shape)
    is_mx = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
    factors = scale.view(torch.float8_e8m0fnu) if is_mx else scale
    # The last group of a row may be shorter.
    group = _MX_GROUP if is_mx else _NVFP4_GROUP
    out.copy_(values.mul_(factors.float().repeat_interleave(group, dim=1)[:, : out.shape[1]]))


def _read_fp8_block(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    out.copy_(weight).mul_(scale.float().repeat_interleave(_FP8_GROUP, dim=1)[:, : out.shape[1]])


_READERS: dict[QuantScheme, _Reader] = {
    FP8_BLOCK128: _read_fp8_block,
    W8A8_INT8: _read_int8_per_channel,
    MXFP4_W4A16: _read_e2m1,
    NVFP4: _read_e2m1,
    NVFP4_W4A16: _read_e2m1,
}


def activation_rounder(scheme: QuantScheme) -> ActivationRounder:
    """The function `(x, input_scale) -> x` that shows activations as a GEMM of `scheme` sees them.

    It rounds `x [rows, C]` (any float dtype) to the scheme's activation dtype and scales it back, giving fp32; a row of
    zeros stays zero. Dynamic int8: scale = amax / 127 of the row in fp32, codes rounded half to even and clamped to
    -128..127. Dynamic fp8: scale = amax / 448 per 128 channels, then e4m3. NVFP4: an e4m3 scale = amax / 6 /
    input_scale per 16 channels, then e2m1, with one fp32 `input_scale` for all rows (the calibrated amax / 2688).
    Activation dtype `same` gives `x` itself.

    Raises:
        UnknownNameError: The scheme has no entry.
    """
    if scheme.activation_dtype == "same":
        return _as_it_is
    if scheme not in _ROUNDERS:
        raise UnknownNameError("quantization scheme", scheme.label, (s.label for s in SUPPORTED_SCHEMES))
    return _ROUNDERS[scheme]


def _as_it_is(x: Tensor, input_scale: Tensor | None) -> Tensor:
    return x


def quantize_rows_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, C]` -> e4m3 `[rows, C]` and fp32 scales `[rows, ceil(C / 128)]`, scale = amax / 448; zeros stay zeros."""
    num_rows, width = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -width % _FP8_GROUP))
    # Counted, since without rows torch cannot infer a size.
    groups = padded.view(num_rows, padded.shape[1] // _FP8_GROUP, _FP8_GROUP)
    scales = groups.abs().amax(-1) / _E4M3_MAX
    divisor = torch.where(scales == 0, 1.0, scales)
    codes = (groups / divisor[..., None]).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:, :width], scales


def _round_fp8_per_group(x: Tensor, input_scale: Tensor | None) -> Tensor:
    codes, scales = quantize_rows_fp8(x)
    return codes.float() * scales.repeat_interleave(_FP8_GROUP, dim=1)[:, : x.shape[1]]


def _round_int8_per_token(x: Tensor, input_scale: Tensor | None) -> Tensor:
    values = x.float()
    scale = values.abs().amax(dim=-1, keepdim=True) / _INT8_MAX
    # A zero row would divide zero by zero; any scale gives it zero codes.
    divisor = torch.where(scale == 0, 1.0, scale)
    return (values / divisor).round_().clamp_(-128.0, _INT8_MAX).mul_(scale)


def _round_nvfp4(x: Tensor, input_scale: Tensor | None) -> Tensor:
    if input_scale is None:
        raise InputError("activations of scheme nvfp4 need input_scale, got None")
    width = x.shape[1]
    # The last group of a row may be shorter.
    padded = torch.nn.functional.pad(x.float(), (0, -width % _NVFP4_GROUP))
    groups = padded.view(x.shape[0], padded.shape[1] // _NVFP4_GROUP, _NVFP4_GROUP)
    block_scale = groups.abs().amax(-1, keepdim=True) / _E2M1_MAX / input_scale
    # Saturating: the cast alone would give NaN beyond the largest e4m3 value.
    block_scale = block_scale.clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn).float()
    scale = block_scale * input_scale
    # A block scale may round to zero; its values are then zero.
    codes = _round_e2m1(groups / torch.where(scale == 0, 1.0, scale))
    return torch.flatten(codes * scale, start_dim=1)[:, :width]


def _round_e2m1(values: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with ties to the even code, saturating."""
    size = values.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return ((values / step).round() * step).clamp(-_E2M1_MAX, _E2M1_MAX)


#: One entry per scheme that rounds activations.
_ROUNDERS: dict[QuantScheme, ActivationRounder] = {
    W8A8_INT8: _round_int8_per_token,
    FP8_BLOCK128: _round_fp8_per_group,
    NVFP4: _round_nvfp4,
}
