"""One GEMM per expert over tiles of rows: the gather of tokens before it and the activation after it included."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.activation import ActivationSpec
from moe_core.kernels.triton.activation import activate, activation_constants
from moe_core.kernels.triton.interpreter import as_operand, narrow
from moe_core.kernels.triton.sort import RowTiles
from moe_core.kernels.triton.tiles import Tile
from moe_core.kernels.triton.weights import GroupedWeight, load_tile, load_weight_only, strides_of
from moe_core.payloads import Tensor

#: Tiles of rows that take turns on the same weights, so that the second finds them in the cache.
_ROW_TILES_PER_TURN = 8


def grouped_gemm(
    rows: Tensor,
    weight: GroupedWeight,
    tiles: RowTiles,
    out: Tensor,
    tile: Tile,
    *,
    activation: ActivationSpec | None = None,
    row_scale: Tensor | None = None,
    row_group: int = 0,
    order: Tensor | None = None,
    top_k: int = 1,
    pdl: bool = False,
) -> Tensor:
    """`out[r] = activation(rows[r] @ weight[expert].T + bias)` for every row of `tiles`.

    Sums are made in fp32 (int32 for int8), everything after them in fp32, with one rounding to `out`'s dtype.

    Args:
        rows: `[*, C]`, unit stride along columns; floats, or codes with `row_scale`.
        weight: The weights; 8-bit ones are multiplied by 8-bit rows, and dequantized for float rows.
        tiles: Which rows there are, and whose.
        out: `[*, N]`, `[*, N / 2]` after a gated activation; only rows of `tiles` are written.
        tile: Sizes of the tiles; `tile.m` is `tiles.block_m`.
        activation: None for none.
        row_scale: fp32 `[*, groups]` of quantized `rows`.
        row_group: Inputs that share one of them, 0 for all.
        order: `[N]`, the slot of each row if `rows` are tokens, which are then gathered (`order[r] // top_k`).
        top_k: Slots per token, with `order`.
        pdl: Start before the launch in front of this one has ended (see the package).

    Returns:
        `out`.
    """
    data, scale = weight.data, weight.scale
    gated = activation is not None and activation.gated
    width = data.shape[1] // (2 if gated else 1)
    num_inputs = weight.num_inputs
    grid = (len(tiles) * triton.cdiv(width, tile.n),)
    # Rows of a layer without a gate are in the order of its outputs as well.
    interleaved = activation is None or not activation.gated or activation.row_order == "interleaved"
    _grouped_gemm[grid](
        out,
        rows,
        weight.descriptor(tile.n, tile.k, 2 if gated else 1, interleaved) if tile.tma else data,
        weight.bias,
        row_scale,
        scale,
        weight.zero_point,
        weight.row_scale,
        order,
        tiles.table,
        width,
        num_inputs,
        len(tiles),
        top_k,
        rows.stride(0),
        out.stride(0),
        *data.stride(),
        *strides_of(weight.bias, 2),
        0 if row_scale is None else row_scale.stride(0),
        *strides_of(scale, 3),
        *strides_of(weight.zero_point, 3),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        TURN=_ROW_TILES_PER_TURN,
        SWAP=tile.swap,
        EVEN_K=num_inputs % tile.k == 0,
        INTERLEAVED=interleaved,
        TMA=tile.tma,
        PACKING=weight.packing,
        SCALING=_scaling(rows, weight, row_scale),
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=weight.block[1],
        ROW_GROUP=row_group,
        PDL=pdl,
        **activation_constants(activation),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=pdl,
    )
    return out


def _scaling(rows: Tensor, weight: GroupedWeight, row_scale: Tensor | None) -> str:
    """Where scales are applied: nowhere, in the tile of weights, after all of K, or after each block of K."""
    if row_scale is None:
        return "none" if weight.data.dtype == rows.dtype else "weight"
    return "row" if weight.scale is None else "block"


@triton.jit
def _position(num_row_tiles, width, BN: tl.constexpr, TURN: tl.constexpr):
    """Tile of rows and tile of columns of this program: a few tiles of rows share each tile of weights."""
    columns = tl.cdiv(width, BN)
    program = tl.program_id(0)
    turn = program // (TURN * columns)
    rows_in_turn = tl.minimum(num_row_tiles - turn * TURN, TURN)
    inside = program % (TURN * columns)
    return turn * TURN + inside % rows_in_turn, inside // rows_in_turn


@triton.jit
def _product(x, w, acc, SWAP: tl.constexpr):
    """`acc + x @ w.T`, or its transpose where the weights are the first operand."""
    # Hopper adds up fp8 products in fewer bits than fp32; after a step they are added to it.
    IMPRECISE: tl.constexpr = x.shape[1] if x.dtype == tl.float8e4nv else None
    if SWAP:
        acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=IMPRECISE, out_dtype=acc.dtype)
    else:
        acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=IMPRECISE, out_dtype=acc.dtype)
    return acc


@triton.jit
def _factors(of_rows, of_columns, SWAP: tl.constexpr):
    """One factor per element of a product made by `_product`."""
    return of_columns[:, None] * of_rows[None, :] if SWAP else of_rows[:, None] * of_columns[None, :]


# The number of tiles changes with the tokens and nothing is gained from its divisors.
@triton.jit(do_not_specialize=["num_row_tiles"])
def _grouped_gemm(
    out,
    x,
    w,
    bias,
    x_scale,
    w_scale,
    w_zero,
    w_row_scale,
    order,
    tiles,
    width,
    num_inputs,
    num_row_tiles,
    top_k,
    stride_x,
    stride_out,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    stride_bn,
    stride_sx,
    stride_se,
    stride_sn,
    stride_sk,
    stride_ze,
    stride_zn,
    stride_zk,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TURN: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PACKING: tl.constexpr,
    SCALING: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    PDL: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BETA: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
):
    """Columns of the product are weight rows; of a gated one they alternate, gate and up, whatever the rows' order."""
    row_tile, column_tile = _position(num_row_tiles, width, BN, TURN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(tiles + 3 * row_tile)
    if expert < 0:
        return
    first = tl.load(tiles + 3 * row_tile + 1)
    rows = first + tl.arange(0, BM)
    there = rows < tl.load(tiles + 3 * row_tile + 2)
    # Rows past the group repeat its first one and are not stored.
    rows = tl.where(there, rows, first)
    sources = rows
    if order is not None:
        sources = tl.load(order + rows) // top_k
    sources = sources.to(tl.int64)

    HALVES: tl.constexpr = 2 if GATED else 1
    BW: tl.constexpr = BN * HALVES
    columns = column_tile * BW + tl.arange(0, BW)
    # Columns past the last repeat the first ones and are not stored.
    w_rows = columns % (width * HALVES)
    if not INTERLEAVED:
        w_rows = (w_rows % 2) * width + w_rows // 2
    expert = expert.to(tl.int64)
    if not TMA:
        base = w + expert * stride_we
    scale_rows = w_rows // SCALE_ROWS
    scales = w_scale
    zeros = w_zero
    if w_scale is not None:
        scales += expert * stride_se + scale_rows * stride_sn
    if w_zero is not None:
        zeros += expert * stride_ze + scale_rows * stride_zn

    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros((BW, BM) if SWAP else (BM, BW), dtype=SUM)
    for k in range(0, num_inputs, BK):
        k_columns = k + tl.arange(0, BK)
        x_tile = as_operand(
            load_tile(x + sources[:, None] * stride_x + k_columns[None, :], k_columns, num_inputs, EVEN_K)
        )
        if TMA:
            w_tile = as_operand(tl.reshape(w.load([expert.to(tl.int32), column_tile * BN, 0, k]), (BW, BK)))
        elif SCALING == "weight":
            w_tile = load_weight_only(
                base + w_rows * stride_wn,
                scales,
                zeros,
                k,
                num_inputs,
                stride_wk,
                stride_sk,
                stride_zk,
                PACKING,
                SCALE_COLUMNS,
                BK,
                EVEN_K,
                x.dtype.element_ty,
            )
        else:
            pointers = base + w_rows[:, None] * stride_wn + k_columns[None, :] * stride_wk
            w_tile = as_operand(load_tile(pointers, k_columns, num_inputs, EVEN_K))
        if SCALING == "block":
            part = _product(x_tile, w_tile, tl.zeros_like(acc), SWAP)
            x_factor = tl.load(x_scale + sources * stride_sx + k // ROW_GROUP)
            w_factor = tl.load(scales + k // SCALE_COLUMNS * stride_sk).to(tl.float32)
            acc += part * _factors(x_factor, w_factor, SWAP)
        else:
            acc = _product(x_tile, w_tile, acc, SWAP)

    if SWAP:
        acc = tl.trans(acc)
    acc = acc.to(tl.float32)
    if SCALING == "row":
        acc *= tl.load(x_scale + sources * stride_sx)[:, None]
    if w_row_scale is not None:
        acc *= tl.load(w_row_scale + expert * width * HALVES + w_rows)[None, :]
    if bias is not None:
        acc += tl.load(bias + expert * stride_be + w_rows * stride_bn).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (BM, BN, 2)))
    else:
        gate = acc
        up = acc
    value = activate(gate, up, KIND, GATED, ALPHA, LIMIT, BETA, CLAMP_AFTER)
    out_columns = column_tile * BN + tl.arange(0, BN)
    pointers = out + rows.to(tl.int64)[:, None] * stride_out + out_columns[None, :]
    tl.store(pointers, narrow(value, out.dtype.element_ty), mask=there[:, None] & (out_columns[None, :] < width))
