"""The form of tokens between dispatch and the experts: what each dtype and scale layout means in memory.

Letters: `R` rows (`L * M` of masked blocks), `H` hidden size. Two fp4 values share a byte, the first in the low nibble.
"""

from __future__ import annotations

import attrs
import torch
from torch.nn import functional

from moe_core.payloads import TORCH_DTYPES, Tensor
from moe_core.specs import TokenDtype
from moe_core.testing.formats import (
    E2M1_MAX,
    decode,
    encode_e2m1,
    power_of_two_at_least,
    power_of_two_up_to,
    round_to_e4m3,
)
from moe_core.testing.outcome import NotRun, require
from moe_core.testing.rounding import LARGEST


@attrs.frozen
class _Elements:
    """A token dtype: torch's dtype, the word of its codes, and how many share a byte."""

    dtype: torch.dtype
    code: str
    packed: int = 1


_ELEMENTS = {
    **{word: _Elements(dtype, "same") for word, dtype in TORCH_DTYPES.items()},
    "fp8": _Elements(torch.float8_e4m3fn, "fp8"),
    "mxfp8": _Elements(torch.float8_e4m3fn, "fp8"),
    "int8": _Elements(torch.int8, "int8"),
    "nvfp4": _Elements(torch.uint8, "fp4", packed=2),
    "mxfp4": _Elements(torch.uint8, "fp4", packed=2),
}


@attrs.frozen
class _Scales:
    """A scale layout.

    Attributes:
        dtype: Element type of the tensor.
        word: What a scale is: `fp32`, `e8m0` or `e4m3`.
        group: Channels per scale; 0: all of a row, -1: all rows.
        per_element: Scales in one element of the tensor.
        by_column: Whether neighbouring rows are neighbours in memory.
        is_tiled: Whether each expert's lie in tiles of 128 rows by 4 scales.
    """

    dtype: torch.dtype
    word: str
    group: int
    per_element: int = 1
    by_column: bool = False
    is_tiled: bool = False


_SCALES = {
    "row_128": _Scales(torch.float32, "fp32", 128),
    "column_128": _Scales(torch.float32, "fp32", 128, by_column=True),
    "ue8m0_128": _Scales(torch.int32, "e8m0", 128, per_element=4, by_column=True),
    "tensor": _Scales(torch.float32, "fp32", -1),
    "token": _Scales(torch.float32, "fp32", 0),
    "block_16": _Scales(torch.float8_e4m3fn, "e4m3", 16),
    "block_16_tiled": _Scales(torch.float8_e4m3fn, "e4m3", 16, is_tiled=True),
    "e8m0_32": _Scales(torch.uint8, "e8m0", 32),
}
#: The pairs that have a meaning here.
WIRE_DTYPES = (
    *(TokenDtype("fp8", layout) for layout in ("row_128", "column_128", "ue8m0_128", "tensor", "token")),
    *(TokenDtype("int8", layout) for layout in ("row_128", "column_128", "tensor", "token")),
    TokenDtype("mxfp8", "e8m0_32"),
    TokenDtype("mxfp4", "e8m0_32"),
    TokenDtype("nvfp4", "block_16"),
    TokenDtype("nvfp4", "block_16_tiled"),
)
#: Rows of an expert and channels of a token are multiples of these where scales lie in tiles.
TILE_ROWS, TILE_CHANNELS = 128, 64


def rounds_as(token_dtype: TokenDtype) -> tuple[str, int, str]:
    """Codes, channels per scale (as `QuantScheme.activation_group`) and word of the scales of quantized tokens."""
    scales = _SCALES[token_dtype.scales]
    return _elements(token_dtype).code, {0: -1, -1: 0}.get(scales.group, scales.group), scales.word


def _elements(token_dtype: TokenDtype) -> _Elements:
    if token_dtype.dtype not in _ELEMENTS:
        raise NotRun(f"tokens of {token_dtype} can be read by their own runner only")
    return _ELEMENTS[token_dtype.dtype]


def check_token_form(rows: Tensor, scales: Tensor | None, token_dtype: TokenDtype, hidden_size: int) -> None:
    """Raise `ConformanceError` unless rows `[.., H]` and their scales are what the plan's dtype says."""
    expected = _elements(token_dtype)
    require(rows.dtype == expected.dtype, f"tokens are {rows.dtype}, the plan says {token_dtype}")
    width = -(-hidden_size // expected.packed)
    require(rows.shape[-1] == width, f"tokens have {rows.shape[-1]} elements, expected {width}")
    require((scales is None) == (token_dtype.scales == "none"), f"tokens of {token_dtype} with scales {scales!r}")
    if scales is None:
        return
    layout = _SCALES[token_dtype.scales]
    require(scales.dtype == layout.dtype, f"scales are {scales.dtype}, {token_dtype} has {layout.dtype}")
    if layout.group == -1:
        require(scales.numel() == 1, f"scales have shape {list(scales.shape)}, {token_dtype} has one for all rows")
        return
    shape = tuple(rows.shape[:-1])
    if layout.group:
        shape += (-(-hidden_size // (layout.group * layout.per_element)),)
    require(tuple(scales.shape) == shape, f"scales have shape {list(scales.shape)}, expected {list(shape)}")
    if layout.by_column:
        require(scales.stride(-2) == 1, f"scales have strides {scales.stride()}, {token_dtype} has stride 1 along rows")
    if layout.is_tiled:
        require(scales.is_contiguous(), f"scales have strides {scales.stride()}, {token_dtype} is contiguous")


def token_values(rows: Tensor, scales: Tensor | None, token_dtype: TokenDtype, unit: float = 1.0) -> Tensor:
    """Float64 values `[R, H]` on the CPU of rows that may be quantized; NaN codes stay NaN.

    Args:
        rows: `[.., H]`, packed ones `[.., H / 2]`.
        scales: As the dtype says.
        token_dtype: What they are.
        unit: The global scale of `block_16`.

    Raises:
        NotRun: The dtype has no meaning here.
    """
    element = _elements(token_dtype)
    flat = rows.detach().cpu().reshape(-1, rows.shape[-1])
    values = flat.double() if element.code == "same" else decode(flat, element.code)
    if scales is None:
        return values
    layout = _SCALES[token_dtype.scales]
    stored = scales.detach().cpu()
    if layout.group == -1:
        return values * stored.double().reshape(1, 1)
    if layout.per_element > 1:
        # Words lie by column; their bytes are in the order of channels.
        stored = stored.new_empty(stored.shape).copy_(stored).view(torch.uint8)
    stored = scales_by_row(stored, token_dtype)
    count = stored.shape[-1] if layout.group else 1
    factors = decode(stored, layout.word).reshape(values.shape[0], count)
    if layout.word == "e4m3":
        factors = factors * unit
    group = layout.group or values.shape[1]
    return values * factors[:, torch.arange(values.shape[1]) // group]


def as_tokens(rows: Tensor, token_dtype: TokenDtype, unit: float | None = None) -> tuple[Tensor, Tensor]:
    """Float rows `[.., H]` -> codes and scales of a quantized token dtype, on the same device.

    Args:
        rows: The tokens; NaN rows become anything, except that with one scale for all there must be none.
        token_dtype: One of `WIRE_DTYPES`.
        unit: The calibrated scale: of `tensor` (default: from the rows), or the global one of `block_16`.
    """
    element, layout = _elements(token_dtype), _SCALES[token_dtype.scales]
    values = rows.detach().cpu().double()
    width = values.shape[-1]
    group = layout.group if layout.group > 0 else max(width, 1)
    padded = functional.pad(values, (0, -width % group))
    groups = padded.view(*padded.shape[:-1], padded.shape[-1] // group, group)
    scale = _scale_of(groups, element.code, layout, unit)
    codes = (groups / torch.where(scale == 0, 1.0, scale)).flatten(-2)[..., :width]
    return _encoded(codes, element).to(rows.device), _laid_out(scale[..., 0], layout, unit).to(rows.device)


def one_scale(rows: Tensor, code: str) -> float:
    """The scale that all of some rows share: of the largest value."""
    return float(rows.abs().max()) / LARGEST[code] if rows.numel() else 1.0


def _scale_of(groups: Tensor, code: str, layout: _Scales, unit: float | None) -> Tensor:
    """Float64 `[.., groups, 1]`, rounded to what the layout can hold."""
    largest = groups.abs().amax(-1, keepdim=True)
    if layout.group == -1:
        fixed = one_scale(groups, code) if unit is None else unit
        return torch.full_like(largest, fixed).float().double()
    scale = (largest / LARGEST[code]).float().double()
    positive = torch.where(scale > 0, scale, 1.0)
    if layout.word == "e8m0":
        if code == "fp4":
            # OCP MX: the exponent of the largest value over that of the largest code.
            return power_of_two_up_to(torch.where(scale > 0, largest, 1.0)) / power_of_two_up_to(torch.tensor(E2M1_MAX))
        return power_of_two_at_least(positive)
    if layout.word == "e4m3":
        return round_to_e4m3(scale / (unit or 1.0)) * (unit or 1.0)
    return scale


def _encoded(values: Tensor, element: _Elements) -> Tensor:
    if element.code == "fp4":
        codes = functional.pad(encode_e2m1(values), (0, values.shape[-1] % 2))
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    if element.code == "fp8":
        return round_to_e4m3(values).to(torch.float8_e4m3fn)
    return values.nan_to_num(0.0).round().clamp(-128, 127).to(element.dtype)


def _laid_out(scale: Tensor, layout: _Scales, unit: float | None) -> Tensor:
    """Float64 `[.., groups]` -> the tensor that travels."""
    if layout.group == -1:
        return scale.flatten()[:1].float() if scale.numel() else torch.ones(1)
    if layout.group == 0:
        return scale[..., 0].float()
    if layout.word == "e4m3":
        stored = (scale / (unit or 1.0)).to(torch.float8_e4m3fn)
    elif layout.word == "e8m0":
        stored = (scale.log2().nan_to_num(0.0) + 127).clamp(0, 254).to(torch.uint8)
    else:
        stored = scale.float()
    if layout.is_tiled:
        return _in_tiles(stored)
    if layout.per_element > 1:
        stored = functional.pad(stored, (0, -stored.shape[-1] % layout.per_element)).contiguous().view(torch.int32)
    return _by_column(stored) if layout.by_column else stored


def _places(num_rows: int, num_scales: int) -> Tensor:
    """Of each scale of an expert, row by row, the byte at which it lies in tiles."""
    if num_rows % TILE_ROWS or num_scales % (TILE_CHANNELS // 16):
        raise NotRun(f"{num_rows} rows of {num_scales} scales are no whole tiles")
    row, group = torch.arange(num_rows)[:, None], torch.arange(num_scales)
    tile = row // 128 * (num_scales // 4) + group // 4
    return (tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4).flatten()


def scales_in_place(scales: Tensor, token_dtype: TokenDtype) -> Tensor:
    """Scales `[.., M, S]` row by row -> as they travel."""
    return _in_tiles(scales) if _SCALES[token_dtype.scales].is_tiled else scales


def scales_by_row(scales: Tensor, token_dtype: TokenDtype) -> Tensor:
    """The inverse of `scales_in_place`."""
    return _row_by_row(scales) if _SCALES[token_dtype.scales].is_tiled else scales


def _in_tiles(stored: Tensor) -> Tensor:
    """`[.., M, S]` of one byte each, moved into tiles."""
    places, tiled = _places(*stored.shape[-2:]), torch.empty_like(stored, memory_format=torch.contiguous_format)
    tiled.view(torch.uint8).flatten(-2)[..., places] = stored.view(torch.uint8).flatten(-2)
    return tiled


def _row_by_row(tiled: Tensor) -> Tensor:
    """The inverse of `_in_tiles`."""
    return tiled.view(torch.uint8).flatten(-2)[..., _places(*tiled.shape[-2:])].view(tiled.shape).view(tiled.dtype)


def _by_column(stored: Tensor) -> Tensor:
    """The same `[.., R, C]` with stride 1 along rows, and columns that begin at multiples of 16 bytes."""
    rows = stored.shape[-2]
    columns = stored.new_empty((*stored.shape[:-2], stored.shape[-1], -(-rows // 4) * 4))[..., :rows]
    return columns.copy_(stored.mT).mT
