"""Stored weights to fp32: one way to read each element type, one way to apply the scales of any tile."""

from __future__ import annotations

from typing import TypeAlias

import attrs
import torch

from moe_core.kernels.number_formats import E4M3_BITS_UNIT, byte_pairs, e4m3_bits, has_e4m3_nan, scale_values
from moe_core.payloads import Tensor
from moe_core.quant import WEIGHT_BITS, WHOLE

#: Rows and columns that share a scale, `WHOLE` for an axis.
Tile: TypeAlias = tuple[int, int]


@attrs.define(eq=False)
class WeightReader:
    """Stored weights as rows, to be read in blocks of rows; what blocks have in common is computed once.

    Attributes:
        weight: `[rows, C]`, 4-bit elements uint8 `[rows, C / 2]`.
        weight_dtype: Word of its elements.
        scale: fp32 `[rows, G]`, what multiplies each group of columns of the codes as they are read, or None.
        zero_point: fp32 `[rows, G]`, what is subtracted before, or None.
        group: Columns of one group; the last one of a row may be shorter.
        unit: What codes are read in multiples of; `scale` makes up for it.
    """

    weight: Tensor
    weight_dtype: str
    scale: Tensor | None
    zero_point: Tensor | None
    group: int
    unit: float = 1.0

    @classmethod
    def of(
        cls, weight: Tensor, weight_dtype: str, tile: Tile, scale: Tensor | None, zero_point: Tensor | None
    ) -> WeightReader:
        """A reader of the tensors of one expert, or of several, whose rows follow each other.

        Args:
            weight: `[N, C]` or `[experts, N, C]`, 4-bit elements as in the attribute.
            weight_dtype: As the attribute.
            tile: Of `scale` and `zero_point`.
            scale: `[.., N / tile rows, C / tile columns]`, rounded up, as stored; None where the caller scales outputs.
            zero_point: int8 of the same shape (`[.., N, 1]` without `scale`), or None.
        """
        group = num_columns(weight, weight_dtype) if tile[1] == WHOLE else tile[1]
        factors, unit = None if scale is None else scale_values(scale), 1.0
        if factors is not None and _reads_bits(weight, weight_dtype):
            in_units = factors * E4M3_BITS_UNIT
            # Of scales from 2**120 on the unit would make infinity.
            if bool(in_units.isfinite().all()):
                factors, unit = in_units, E4M3_BITS_UNIT
        factors = None if factors is None else _by_row(factors, weight.shape[-2], tile[0])
        zeros = None if zero_point is None else _by_row(zero_point.float(), weight.shape[-2], tile[0])
        return cls(weight.flatten(0, -2), weight_dtype, factors, zeros, group, unit)

    def read(self, out: Tensor, first: int) -> None:
        """Weight rows `first ..` into fp32 `out [rows, C]` of any strides."""
        rows = slice(first, first + out.shape[0])
        part = self.weight[rows]
        if WEIGHT_BITS[self.weight_dtype] == 4:
            _read_pairs(out, part, self.weight_dtype)
        elif _reads_bits(part, self.weight_dtype):
            _read_e4m3(out, part, self.unit)
        else:
            out.copy_(part)
        if self.zero_point is not None:
            for columns, zeros in self._groups(out, self.zero_point[rows]):
                columns.sub_(zeros)
        if self.scale is not None:
            for columns, factors in self._groups(out, self.scale[rows]):
                columns.mul_(factors)

    def _groups(self, out: Tensor, by_group: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The groups of whole length as one view, and a shorter last one, each beside what belongs to it."""
        whole = out.shape[1] // self.group
        groups = out[:, : whole * self.group].view(out.shape[0], whole, self.group), by_group[:, :whole, None]
        rest = out[:, whole * self.group :], by_group[:, whole:]
        return [groups, rest] if rest[0].shape[1] else [groups]


def num_columns(weight: Tensor, weight_dtype: str) -> int:
    """`C` of a stored weight `[..., C]`; 4-bit elements share bytes, `[..., C / 2]`."""
    return weight.shape[-1] * (2 if WEIGHT_BITS[weight_dtype] == 4 else 1)


def _by_row(by_tile: Tensor, num_rows: int, rows_per_tile: int) -> Tensor:
    if rows_per_tile != 1:
        times = num_rows if rows_per_tile == WHOLE else rows_per_tile
        by_tile = by_tile.repeat_interleave(times, dim=-2)[..., :num_rows, :]
    return by_tile.flatten(0, -2)


def _read_pairs(out: Tensor, weight: Tensor, weight_dtype: str) -> None:
    in_place = out.is_contiguous()
    words = (out if in_place else torch.empty_like(out, memory_format=torch.contiguous_format)).view(torch.int64)
    # One look-up writes two numbers: half the look-ups, and no conversion after them.
    pairs = byte_pairs(weight_dtype, weight.device)
    torch.index_select(pairs, 0, weight.reshape(-1).int(), out=words.view(-1))
    if not in_place:
        out.copy_(words.view(torch.float32))


def _reads_bits(weight: Tensor, weight_dtype: str) -> bool:
    """Whether e4m3 is read on its bits: torch's own conversion on CPU takes twenty times as long."""
    return weight_dtype == "fp8" and weight.device.type == "cpu"


def _read_e4m3(out: Tensor, weight: Tensor, unit: float) -> None:
    """In multiples of `unit`, 1 or `E4M3_BITS_UNIT`."""
    if has_e4m3_nan(weight):
        out.copy_(weight).div_(unit)
        return
    out.copy_(e4m3_bits(weight))
    if unit != E4M3_BITS_UNIT:
        out.mul_(E4M3_BITS_UNIT)
