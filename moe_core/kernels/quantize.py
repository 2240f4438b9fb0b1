"""Stored weights to floats, and activations to the values that a quantized GEMM would see.

One table entry per scheme. Number formats: `moe_core.quant`; e2m1 and e8m0 as in OCP Microscaling v1.0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_core.errors import InputError, UnknownNameError
from moe_core.kernels.schemes import FLOAT_SCHEMES, SUPPORTED_SCHEMES
from moe_core.payloads import Tensor
from moe_core.quant import MXFP4_W4A16, W8A8_INT8, QuantScheme

#: `(weight rows, their scales, fp32 output) -> None`; rows are independent, so a part of an expert may be given.
_Reader = Callable[[Tensor, Tensor, Tensor], None]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: Both values of every packed byte, low nibble first.
_E2M1_PAIRS = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)])
_INT8_MAX = 127.0


def dequantize(
    weight: Tensor, scale: Tensor | None, scheme: QuantScheme, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of one expert's stored weight, or of some of its rows.

    Args:
        weight: `[N, C]` in the stored form of `scheme` (fp4: uint8 `[N, C / 2]`, element 2i in the low nibble).
        scale: int8: `[N]` or `[N, 1]`; fp4: `[N, C / 32]` uint8 exponent bytes or float8_e8m0fnu; None for floats.
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


def _read_mxfp4(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    pairs = _E2M1_PAIRS.to(weight.device)
    values = torch.nn.functional.embedding(weight.int(), pairs).view(*scale.shape, 32)
    exponents = scale.view(torch.float8_e8m0fnu).float()
    out.copy_(values.mul_(exponents.unsqueeze(-1)).view(out.shape))


_READERS: dict[QuantScheme, _Reader] = {W8A8_INT8: _read_int8_per_channel, MXFP4_W4A16: _read_mxfp4}


def readable_schemes() -> tuple[QuantScheme, ...]:
    """Every scheme that `dequantize` reads."""
    return (*FLOAT_SCHEMES, *_READERS)


def fake_quantize_activations(x: Tensor, scheme: QuantScheme) -> Tensor:
    """The activations as a GEMM of `scheme` sees them: rounded to its activation dtype and scaled back.

    Args:
        x: `[rows, C]`, any float dtype.
        scheme: Says the activation dtype; `same` returns `x` itself.

    Returns:
        `[rows, C]` fp32. Dynamic int8: scale = amax / 127 of the row in fp32, codes rounded half to even and
        clamped to -128..127; a row of zeros stays zero.

    Raises:
        UnknownNameError: No entry for this activation dtype and scaling.
    """
    if scheme.activation_dtype == "same":
        return x
    if scheme not in _READERS or scheme.activation_dtype != "int8":
        raise UnknownNameError("quantization scheme", scheme.label, (s.label for s in SUPPORTED_SCHEMES))
    values = x.float()
    scale = values.abs().amax(dim=-1, keepdim=True) / _INT8_MAX
    # A zero row would divide zero by zero; any scale gives it zero codes.
    divisor = torch.where(scale == 0, 1.0, scale)
    return (values / divisor).round_().clamp_(-128.0, _INT8_MAX).mul_(scale)
