"""The form of tokens between dispatch and the experts: what each dtype and scale layout means in memory.

Letters: `R` rows (`L * M` of masked blocks), `H` hidden size.
"""

from __future__ import annotations

import torch

from moe_core.payloads import TORCH_DTYPES, Tensor
from moe_core.specs import TokenDtype
from moe_core.testing.formats import decode_e4m3, decode_e8m0
from moe_core.testing.outcome import NotRun, require

_ELEMENTS = {**TORCH_DTYPES, "fp8": torch.float8_e4m3fn, "mxfp8": torch.float8_e4m3fn, "int8": torch.int8}
#: Scale layout -> element type and channels per scale (0: all); those with words of their own are not here.
_SCALES = {
    "row_128": (torch.float32, 128),
    "column_128": (torch.float32, 128),
    "token": (torch.float32, 0),
    "e8m0_32": (torch.uint8, 32),
}


def check_token_form(rows: Tensor, scales: Tensor | None, token_dtype: TokenDtype, hidden_size: int) -> None:
    """Raise `ConformanceError` unless rows `[.., H]` and their scales are what the plan's dtype says."""
    expected = _ELEMENTS.get(token_dtype.dtype)
    if expected is not None:
        require(rows.dtype == expected, f"tokens are {rows.dtype}, the plan says {token_dtype}")
        require(rows.shape[-1] == hidden_size, f"tokens have {rows.shape[-1]} channels, expected {hidden_size}")
    require((scales is None) == (token_dtype.scales == "none"), f"tokens of {token_dtype} with scales {scales!r}")
    if scales is None or token_dtype.scales not in _SCALES:
        return
    element, group = _SCALES[token_dtype.scales]
    count = -(-hidden_size // group) if group else 0
    shape = (*rows.shape[:-1], count) if group else tuple(rows.shape[:-1])
    require(scales.dtype == element, f"scales are {scales.dtype}, {token_dtype} has {element}")
    require(tuple(scales.shape) == shape, f"scales have shape {list(scales.shape)}, expected {list(shape)}")
    if token_dtype.scales == "column_128":
        require(scales.stride(-2) == 1, f"scales have strides {scales.stride()}, {token_dtype} has stride 1 along rows")


def token_values(rows: Tensor, scales: Tensor | None, token_dtype: TokenDtype) -> Tensor:
    """Float64 values `[R, H]` of rows that may be quantized; raises `NotRun` for layouts without a public meaning."""
    flat = rows.reshape(-1, rows.shape[-1])
    if scales is None:
        return flat.cpu().double()
    if token_dtype.scales not in _SCALES:
        raise NotRun(f"tokens of {token_dtype} can be read by their own runner only")
    element, group = _SCALES[token_dtype.scales]
    values = decode_e4m3(flat.cpu()) if token_dtype.dtype in ("fp8", "mxfp8") else flat.cpu().double()
    factors = decode_e8m0(scales.cpu()) if element == torch.uint8 else scales.cpu().double()
    if not group:
        return values * factors.reshape(-1, 1)
    factors = factors.reshape(flat.shape[0], -1)
    return values * factors[:, torch.arange(values.shape[1]) // group]
