"""What was read, as canonical values: codes in canonical bytes, scales in the scheme's dtype, zero points."""

from __future__ import annotations

import torch

from moe_core.errors import WeightsError
from moe_core.payloads import Tensor
from moe_core.weights.codes import exponent_bytes, pack, raised, sign_bit, unpack
from moe_core.weights.reads import Read
from moe_core.weights.spans import Cut

#: The one byte of e8m0 that is no number.
_E8M0_NAN = 255


def matrix(values: Tensor, read: Read) -> Tensor:
    """The stored matrix as `[rows, columns]`, still packed."""
    if read.part.stacked:
        values = values[0]
    if read.tensor.blocked:
        values = values.flatten(-2)
    if values.dim() == 4:
        values = values[:, 0, :, 0]
    if values.dim() == 1:
        return values[:, None]
    return values.mT if read.turned else values


def weight(values: Tensor, read: Read, fill: Tensor | None) -> Tensor:
    """The weights of a band in canonical form, 4-bit ones packed.

    Args:
        values: The stored matrix, `[rows, columns]`.
        read: What it is.
        fill: `[rows, columns]` codes of a whole band, padding included, that mean zero; None where code 0 does.

    Returns:
        The rows and columns that exist; with `fill` all of them.

    Raises:
        WeightsError: Bytes that should hold 4-bit integers hold others.
    """
    rows, columns = _cuts(read)
    scheme = read.part.storage.scheme
    bits = scheme.weight_bits
    in_order = read.tensor.packed == "columns" and not read.tensor.places
    if bits == 4 and in_order and fill is None and _is_even(columns):
        stored = values.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        keep = columns.keep
        if isinstance(keep, slice):
            stored = stored[:, keep.start // 2 : keep.stop // 2]
        stored = rows.of(stored, 0)
        return stored ^ 0x88 if read.tensor.unsigned else stored
    codes = columns.of(rows.of(_codes(values, read), 0), 1)
    if fill is not None:
        whole = fill.clone()
        whole[: codes.shape[0], : codes.shape[1]] = codes
        codes = whole
    if bits == 4:
        padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        return pack(padded)
    return codes


def _codes(values: Tensor, read: Read) -> Tensor:
    """Weights one by one: floats, int8, or 4-bit codes in uint8."""
    bits = read.part.storage.scheme.weight_bits
    if read.per > 1:
        axis = 0 if read.tensor.packed == "rows" else 1
        codes = unpack(values, axis, bits, read.tensor.places)
        codes = codes ^ sign_bit(bits) if read.tensor.unsigned else codes
        return codes if bits == 4 else codes.view(torch.int8)
    if bits == 4:
        if bool(((values < -8) | (values > 7)).any()):
            raise WeightsError(f"{read.name}: values outside -8..7 are no 4-bit integers")
        return values.view(torch.uint8) & 15
    return values


def _cuts(read: Read) -> tuple[Cut, Cut]:
    if read.rows is None or read.columns is None:
        raise WeightsError(f"{read.name}: read without rows")
    return read.rows, read.columns


def _is_even(cut: Cut) -> bool:
    keep = cut.keep
    return isinstance(keep, slice) and keep.start % 2 == 0 and keep.stop % 2 == 0


def scale(values: Tensor, read: Read, dtype: str) -> Tensor:
    """The scales of a band's tiles `[rows, columns]`; e8m0 as bytes.

    Raises:
        WeightsError: A scale that should be a power of two is none, or one is not finite.
    """
    rows, columns = _cuts(read)
    scales = scale_values(columns.of(rows.of(values, 0), 1), read.name, dtype)
    # Zero is a dead block, and some tools write negative scales on purpose.
    finite = scales != _E8M0_NAN if scales.dtype == torch.uint8 else scales.float().isfinite()
    if not bool(finite.all()):
        raise WeightsError(
            f"{read.name}: expert {read.expert} has scales that are not finite; fetch the checkpoint again"
        )
    return scales


def scale_values(values: Tensor, name: str, dtype: str) -> Tensor:
    """Stored scales in the dtype of the scheme, exactly; `WeightsError` if one is no power of two and should be."""
    if dtype != "e8m0":
        return values.float() if dtype == "fp32" else values
    if values.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return values.view(torch.uint8)
    codes, exact = exponent_bytes(values)
    if not exact:
        raise WeightsError(f"{name}: the scheme has scales that are powers of two, these are not all")
    return codes


def zero_point(values: Tensor, read: Read) -> Tensor:
    """The zero points of a band's tiles `[rows, columns]`, int8, shifted as codes are."""
    rows, columns = _cuts(read)
    bits = read.part.storage.scheme.weight_bits
    if read.per > 1:
        words = raised(values, bits) if read.tensor.lowered else values
        values = unpack(words, 0 if read.tensor.packed == "rows" else 1, bits, read.tensor.places)
    kept = columns.of(rows.of(values, 0), 1).to(torch.int16)
    if read.per > 1 and not read.tensor.unsigned:
        # Two's complement of fewer bits than a byte has.
        kept = kept ^ sign_bit(bits)
    if read.per > 1 or read.tensor.unsigned:
        kept = kept - sign_bit(bits)
    return kept.to(torch.int8)


def scalars(values: Tensor, read: Read) -> Tensor:
    """fp32 `[halves]`, a multiplier for each half of the part in stored order; where one is stored it is both halves'.

    Args:
        values: One or two numbers in any shape; bytes are exponents.
        read: What they are.
    """
    if read.tensor.role == "scale" and values.dtype == torch.uint8:
        values = values.view(torch.float8_e8m0fnu)
    flat = values.double().flatten()
    flat = 1.0 / flat if read.tensor.divides else flat
    halves = len(read.part.halves)
    flat = flat.expand(halves) if flat.numel() == 1 else flat
    return flat.float()
