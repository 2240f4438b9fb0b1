"""One GEMM per expert over tiles of rows: the gather of tokens before it and the activation after it included."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_core.activation import ActivationSpec
from moe_core.errors import SpecError
from moe_core.kernels.quantize import CODE_MAX, CODE_MIN
from moe_core.kernels.triton.activation import activation_constants
from moe_core.kernels.triton.gemm_kernel import grouped_gemm
from moe_core.kernels.triton.launch import Constants, Launches, divided_up, is_aligned
from moe_core.kernels.triton.sort import RowTiles
from moe_core.kernels.triton.tiles import Tile
from moe_core.kernels.triton.weights import GroupedWeight, strides_of, takes_descriptor
from moe_core.payloads import Tensor

#: Most tiles of one expert's rows that take turns on the same weights, so that the second finds them in the cache.
#: Of turns that did not end with an expert four and 16 were 1 to 2 % slower on an H100 over all sizes, 32 was 3 %,
#: none 8 %.
_ROW_TILES_PER_TURN = 8
_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class GroupedGemm:
    """One projection of all local experts: `out[r] = activation(rows[r] @ weight[expert].T + bias)`.

    Sums are made in fp32 (int32 for int8), everything after them in fp32, with one rounding to the result's dtype.

    Attributes:
        width: Columns of the result.
    """

    def __init__(
        self,
        weight: GroupedWeight,
        *,
        activation: ActivationSpec | None = None,
        row_group: int = 0,
        multiprocessors: int = 1,
        pdl: bool = False,
        rounded_from: torch.dtype | None = None,
        rounded_group: int = 0,
        sum_factor: float = 1.0,
        out_factor: float = 1.0,
    ) -> None:
        """What does not change between calls.

        Args:
            weight: The weights; 8-bit ones are multiplied by 8-bit rows, and dequantized for float rows.
            activation: None for none.
            row_group: Inputs that share a scale of quantized rows, 0 for all.
            multiprocessors: Of the device, for tiles whose programs stay.
            pdl: Start before the launch in front of this one has ended (see the package).
            rounded_from: Of results that are rounded to codes, the dtype that they have before.
            rounded_group: Of such results, the columns that share a scale: tiles have whole groups (`rounds`).
            sum_factor: What multiplies sums, before the bias is added.
            out_factor: What multiplies results, before they are rounded to their dtype.
        """
        self._weight, self._activation, self._row_group = weight, activation, row_group
        self._multiprocessors, self._pdl = multiprocessors, pdl
        self._between, self._group = rounded_from, rounded_group
        self._factors = sum_factor, out_factor
        gated = activation is not None and activation.gated
        self._halves = 2 if gated else 1
        self.width = weight.num_rows // self._halves
        self._num_inputs = weight.num_inputs
        # Rows of a layer without a gate are in the order of its outputs as well.
        self._interleaved = activation is None or not activation.gated or activation.row_order == "interleaved"
        self._scales = weight.scale, weight.zero_point, weight.row_scale
        self._stored = weight.stored()
        self._strides = *self._stored.stride()[:3], *strides_of(weight.bias, 2)
        self._scale_strides = *strides_of(weight.scale, 3), *strides_of(weight.zero_point, 3)
        self._launches = Launches(grouped_gemm)

    def rounds(self, tile: Tile) -> bool:
        """Whether results can be written as codes with these tiles."""
        return self._group > 0 and tile.n % self._group == 0

    def __call__(
        self,
        rows: Tensor,
        tiles: RowTiles,
        out: Tensor,
        tile: Tile,
        *,
        row_scale: Tensor | None = None,
        out_planes: bool = False,
        order: Tensor | None = None,
        top_k: int = 1,
        out_scale: Tensor | None = None,
        counts_programs: bool = False,
        awaited: int = 0,
    ) -> Tensor:
        """Multiply every row of `tiles`.

        Args:
            rows: `[*, C]`, unit stride along columns; floats, or codes with `row_scale`.
            tiles: Which rows there are, and whose.
            out: `[*, N]`, `[*, N / 2]` after a gated activation; only rows of `tiles` are written.
            tile: Sizes of the tiles; `tile.m` is `tiles.block_m`, `tile.k` the columns of a panel if there are any.
            row_scale: fp32 `[*, groups]` of quantized `rows`.
            out_planes: Write columns in the order of planes, for a next one whose tile has them.
            order: `[N]`, the slot of each row if `rows` are tokens, which are then gathered (`order[r] // top_k`).
            top_k: Slots per token, with `order`.
            out_scale: fp32 `[*, groups]`, gets the scales of `out` if that takes codes, fp8 or int8.
            counts_programs: Programs count themselves in the tiles whose rows they have written.
            awaited: Start on a tile as soon as so many programs of the launch in front have counted themselves there,
                instead of after its end.

        Returns:
            `out`.
        """
        weight, num_tiles = self._weight, len(tiles)
        # Thousands of programs that find nothing to do take longer than a few that may have to do more than one tile.
        usual = num_tiles if tiles.usual is None else min(max(1, tiles.usual), num_tiles)
        repeats, num_programs = usual < num_tiles, usual * divided_up(self.width, tile.n)
        if tile.resident:
            num_programs = min(num_programs, tile.resident * self._multiprocessors)
        # What the bulk copy engine reads is ordered after the end of a launch, not after counts.
        by_descriptor = tile.tma_rows and order is None and not awaited and takes_descriptor(rows)
        row_strides = rows.stride(0), out.stride(0), *(0 if s is None else s.stride(0) for s in (out_scale, row_scale))
        key = (
            *(tile, rows.dtype, out.dtype, row_strides, top_k, order is None, row_scale is None, out_scale is None),
            *(is_aligned(rows), is_aligned(out), repeats, out_planes, counts_programs, awaited),
        )
        self._launches(
            key,
            (num_programs, 1, 1),
            (
                out,
                out_scale,
                TensorDescriptor(rows, [*rows.shape], [*rows.stride()], [tile.m, tile.k]) if by_descriptor else rows,
                weight.descriptor(tile.n, tile.k, self._halves, self._interleaved) if tile.tma else self._stored,
                weight.bias,
                row_scale,
                *self._scales,
                order,
                tiles.table,
                self.width,
                self._num_inputs,
                num_tiles,
                top_k,
                *row_strides[:3],
                *self._strides,
                row_strides[3],
                *self._scale_strides,
            ),
            lambda: self._constants(
                tile,
                {
                    "REPEATS": repeats,
                    "TMA_ROWS": by_descriptor,
                    "OUT_PLANES": out_planes,
                    "COUNTS_PROGRAMS": counts_programs,
                    "AWAITED": awaited,
                },
                _scaling(rows, weight, row_scale),
                out.dtype,
            ),
        )
        return out

    def _constants(self, tile: Tile, of_call: dict[str, Any], scaling: str, out_dtype: torch.dtype) -> Constants:
        """Of a kernel; `of_call` has the constants that are not those of every call with this tile."""
        weight = self._weight
        if weight.panel_columns not in (0, tile.k):
            raise SpecError(f"{tile}: a step has the columns of a panel, {weight.panel_columns}; make k that many")
        constants = {
            "BM": tile.m,
            "BN": tile.n,
            "BK": tile.k,
            "SWAP": tile.swap,
            "TMA": tile.tma,
            "PERSISTENT": tile.resident > 0,
            "TURN": _ROW_TILES_PER_TURN,
            "EVEN_K": self._num_inputs % tile.k == 0,
            "INTERLEAVED": self._interleaved,
            "PACKING": weight.packing,
            "PLANES": tile.planes,
            "SCALING": scaling,
            "SCALE_ROWS": weight.block[0],
            "SCALE_COLUMNS": weight.block[1],
            "ONE_BLOCK": scaling == "block" and self._lies_in_one_block(tile.n),
            "ROW_GROUP": self._row_group,
            "BETWEEN": None if self._between is None else _TRITON_DTYPES.get(self._between),
            "OUT_GROUP": self._group,
            "CODE_MAX": CODE_MAX.get(out_dtype),
            "CODE_MIN": CODE_MIN.get(out_dtype),
            "SUM_FACTOR": self._factors[0],
            "OUT_FACTOR": self._factors[1],
            "PANEL": weight.panel_rows,
            "PDL": self._pdl,
            **of_call,
            **activation_constants(self._activation),
        }
        return constants, {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "launch_pdl": self._pdl}

    def _lies_in_one_block(self, columns: int) -> bool:
        """Whether the weight rows of every tile of output columns lie in one block of scales, or in one per half."""
        rows = self._weight.block[0]
        if self._halves == 2 and self._interleaved:
            return rows % (2 * columns) == 0
        return rows % columns == 0 and (self._halves == 1 or self.width % rows == 0)


def _scaling(rows: Tensor, weight: GroupedWeight, row_scale: Tensor | None) -> str:
    """Where scales are applied: nowhere, in the tile of weights, after all of K, or after each block of K."""
    if row_scale is None:
        return "none" if weight.data.dtype == rows.dtype else "weight"
    return "row" if weight.scale is None else "block"
