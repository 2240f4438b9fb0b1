"""The kernel of one GEMM per expert, and what it is made of."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.triton.activation import activate
from moe_core.kernels.triton.codes import codes_of, dynamic_scale
from moe_core.kernels.triton.interpreter import INTERPRETED, as_operand, narrow
from moe_core.kernels.triton.planes import add_planes, place_in_planes
from moe_core.kernels.triton.rows import TILE_FIELDS, count_program, wait_for_rows
from moe_core.kernels.triton.weights import load_groups, load_tile, load_weight_only


@triton.jit
def _used(tiles, num_row_tiles):
    """Entries of the table that hold a tile: they come first."""
    used = 0
    for start in range(0, num_row_tiles, 1024):
        entries = start + tl.arange(0, 1024)
        experts = tl.load(tiles + TILE_FIELDS * entries, mask=entries < num_row_tiles, other=-1)
        used += tl.sum((experts >= 0).to(tl.int32))
    return used


@triton.jit
def _tile(tiles, position, columns, BM: tl.constexpr, TURN: tl.constexpr):
    """Expert, entry, first row, row after the expert's last, and tile of columns of one place in the order of all.

    Experts follow each other; a few tiles of one expert's rows take turns on each tile of its weights.
    """
    # An entry of the same turn, which tells where its expert's other tiles are.
    entry = tiles + TILE_FIELDS * (position // columns)
    expert = tl.load(entry)
    first = tl.load(entry + 1)
    end = tl.load(entry + 2)
    before = tl.load(entry + 3) % TURN
    in_turn = tl.minimum(before + tl.cdiv(end - first, BM), TURN)
    inside = before * columns + position % columns
    further = inside % in_turn - before
    return expert, entry + TILE_FIELDS * further, first + further * BM, end, inside // in_turn


@triton.jit
def _weight_rows(column_tile, width, BN: tl.constexpr, HALVES: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Places of a tile's columns in the product, and the weight rows that they come from."""
    columns = column_tile * (BN * HALVES) + tl.arange(0, BN * HALVES)
    # Columns past the last repeat the first ones and are not stored.
    rows = columns % (width * HALVES)
    if not INTERLEAVED:
        rows = (rows % 2) * width + rows // 2
    return columns, rows


@triton.jit
def _product(x, w, acc, SWAP: tl.constexpr, EXACT_EVERY: tl.constexpr):
    """`acc + x @ w.T`, or its transpose where the weights are the first operand."""
    # Hopper adds up fp8 products in fewer bits than fp32; after a step they are added to it.
    IMPRECISE: tl.constexpr = EXACT_EVERY if x.dtype == tl.float8e4nv else None
    if SWAP:
        acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=IMPRECISE, out_dtype=acc.dtype)
    else:
        acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=IMPRECISE, out_dtype=acc.dtype)
    return acc


@triton.jit
def _column_factors(scales, to_up, columns, ONE_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Scales of a tile's weight rows in fp32; a tile inside one block of rows (one per half) loads only those."""
    factor = tl.load(scales).to(tl.float32)
    if ONE_BLOCK:
        if INTERLEAVED:
            factor = tl.broadcast_to(factor, columns.shape)
        else:
            factor = tl.where(columns % 2 == 0, factor, tl.load(scales + to_up).to(tl.float32))
    return factor


@triton.jit
def _rounded(
    value,
    rows,
    there,
    columns,
    scales,
    width,
    stride_os,
    BETWEEN: tl.constexpr,
    GROUP: tl.constexpr,
    CODE_MAX: tl.constexpr,
    CODE_MIN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Codes of a tile of results in groups of columns, as if written in `BETWEEN` before; stores their scales."""
    BM: tl.constexpr = value.shape[0]
    BN: tl.constexpr = value.shape[1]
    # Columns past the last are copies of others.
    value = tl.where(columns[None, :] < width, narrow(value, BETWEEN).to(tl.float32), 0.0)
    value = tl.reshape(value, (BM * (BN // GROUP), GROUP))
    scale = dynamic_scale(value, CODE_MAX)
    codes = tl.reshape(codes_of(value, scale, CODE_MIN, CODE_MAX, DTYPE), (BM, BN))
    groups = tl.min(columns, axis=0) // GROUP + tl.arange(0, BN // GROUP)
    pointers = scales + rows.to(tl.int64)[:, None] * stride_os + groups[None, :]
    mask = there[:, None] & (groups[None, :] * GROUP < width)
    tl.store(pointers, tl.reshape(scale, (BM, BN // GROUP)), mask=mask)
    return codes


@triton.jit
def _factors(of_rows, of_columns, SWAP: tl.constexpr):
    """One factor per element of a product made by `_product`."""
    return of_columns[:, None] * of_rows[None, :] if SWAP else of_rows[:, None] * of_columns[None, :]


# The number of tiles changes with the tokens and nothing is gained from its divisors.
@triton.jit(do_not_specialize=["num_row_tiles"])
def grouped_gemm(
    out,
    out_scale,
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
    stride_os,
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
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    TMA_ROWS: tl.constexpr,
    PERSISTENT: tl.constexpr,
    REPEATS: tl.constexpr,
    TURN: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PACKING: tl.constexpr,
    PLANES: tl.constexpr,
    OUT_PLANES: tl.constexpr,
    SCALING: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    BETWEEN: tl.constexpr,
    OUT_GROUP: tl.constexpr,
    CODE_MAX: tl.constexpr,
    CODE_MIN: tl.constexpr,
    SUM_FACTOR: tl.constexpr,
    OUT_FACTOR: tl.constexpr,
    PANEL: tl.constexpr,
    COUNTS_PROGRAMS: tl.constexpr,
    AWAITED: tl.constexpr,
    PDL: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BETA: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
):
    """Columns of the product are weight rows; of a gated one they alternate, gate and up, whatever the rows' order."""
    HALVES: tl.constexpr = 2 if GATED else 1
    program = tl.program_id(0)
    columns = tl.cdiv(width, BN)
    # The table is there: the launch in front has waited for it before it let this one begin.
    if PDL and not AWAITED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if PERSISTENT:
        end = _used(tiles, num_row_tiles) * columns
        step = tl.num_programs(0)
    else:
        if tl.load(tiles + TILE_FIELDS * (program // columns)) < 0:
            if PDL and AWAITED:
                tl.extra.cuda.gdc_wait()
            return
        end = program + 1
        step = tl.num_programs(0)
        if REPEATS:
            # Only where there are more tiles than programs is it worth knowing how many.
            following = (program + step) // columns
            if tl.load(tiles + TILE_FIELDS * following, mask=following < num_row_tiles, other=-1) >= 0:
                end = _used(tiles, num_row_tiles) * columns
    for position in tl.range(program, end, step, flatten=PERSISTENT):
        expert, entry, first, end_row, column_tile = _tile(tiles, position, columns, BM, TURN)
        rows = first + tl.arange(0, BM)
        there = rows < end_row
        # Rows past the group repeat its first one and are not stored.
        rows = tl.where(there, rows, first)
        sources = rows
        if order is not None:
            sources = tl.load(order + rows) // top_k
        sources = sources.to(tl.int64)
        if AWAITED:
            wait_for_rows(entry, AWAITED)
            if PDL:
                tl.extra.cuda.gdc_launch_dependents()

        BW: tl.constexpr = BN * HALVES
        w_columns, w_rows = _weight_rows(column_tile, width, BN, HALVES, INTERLEAVED)
        panel = (expert * (width * HALVES) + column_tile * BW) // PANEL if PANEL else 0
        expert = expert.to(tl.int64)
        base = w
        if not TMA:
            base += expert * stride_we
        scale_rows = (column_tile * (BW if INTERLEAVED else BN) if ONE_BLOCK else w_rows) // SCALE_ROWS
        scales = w_scale
        zeros = w_zero
        if w_scale is not None:
            scales += expert * stride_se + scale_rows * stride_sn
        if w_zero is not None:
            zeros += expert * stride_ze + scale_rows * stride_zn

        X_DTYPE: tl.constexpr = x.dtype if TMA_ROWS else x.dtype.element_ty
        SUM: tl.constexpr = tl.int32 if tl.int8 == X_DTYPE else tl.float32
        acc = tl.zeros((BW, BM) if SWAP else (BM, BW), dtype=SUM)
        if PLANES:
            acc = add_planes(
                acc,
                base + w_rows * stride_wn,
                x + sources * stride_x,
                there,
                scales,
                zeros,
                num_inputs,
                stride_sk,
                stride_zk,
                SCALE_COLUMNS,
            )
        else:
            if SCALING == "block":
                x_factor = tl.load(x_scale + sources * stride_sx)
                to_up = width // SCALE_ROWS * stride_sn
                w_factor = _column_factors(scales, to_up, w_columns, ONE_BLOCK, INTERLEAVED)
            scale = None
            zero = None
            if SCALING == "weight":
                # The next step's are loaded before the product, which hides the wait for them.
                if w_scale is not None:
                    scale = load_groups(scales, 0, num_inputs, stride_sk, SCALE_COLUMNS, BK)
                if w_zero is not None:
                    zero = load_groups(zeros, 0, num_inputs, stride_zk, SCALE_COLUMNS, BK)
            for k in range(0, num_inputs, BK):
                k_columns = k + tl.arange(0, BK)
                if TMA_ROWS:
                    x_tile = as_operand(x.load([first, k]))
                    if INTERPRETED:
                        # Rows past the group may hold anything, of which NumPy would warn.
                        x_tile = tl.where(there[:, None], x_tile, tl.zeros_like(x_tile))
                else:
                    pointers = x + sources[:, None] * stride_x + k_columns[None, :]
                    real = there[:, None] if EVEN_K else there[:, None] & (k_columns[None, :] < num_inputs)
                    x_tile = as_operand(tl.load(pointers, mask=real, other=0.0))
                if PANEL and TMA:
                    w_tile = as_operand(tl.reshape(w.load([panel, k // BK, column_tile * BW % PANEL, 0]), (BW, BK)))
                elif PANEL:
                    inside = w_columns % (width * HALVES)
                    pointers = base + (inside // PANEL)[:, None] * stride_wn + k // BK * stride_wk
                    w_tile = as_operand(tl.load(pointers + (inside % PANEL)[:, None] * BK + tl.arange(0, BK)[None, :]))
                elif TMA:
                    w_tile = as_operand(tl.reshape(w.load([expert.to(tl.int32), column_tile * BN, 0, k]), (BW, BK)))
                elif SCALING == "weight":
                    w_tile = load_weight_only(
                        base + w_rows * stride_wn, scale, zero, k, num_inputs, stride_wk, PACKING, BK, EVEN_K, X_DTYPE
                    )
                    if w_scale is not None:
                        scale = load_groups(scales, k + BK, num_inputs, stride_sk, SCALE_COLUMNS, BK)
                    if w_zero is not None:
                        zero = load_groups(zeros, k + BK, num_inputs, stride_zk, SCALE_COLUMNS, BK)
                else:
                    pointers = base + w_rows[:, None] * stride_wn + k_columns[None, :] * stride_wk
                    w_tile = as_operand(load_tile(pointers, k_columns, num_inputs, EVEN_K))
                if SCALING == "block":
                    # The next step's are loaded before the product, which hides the wait for them.
                    factors = _factors(x_factor, w_factor, SWAP)
                    ahead = tl.minimum(k + BK, num_inputs - 1)
                    x_factor = tl.load(x_scale + sources * stride_sx + ahead // ROW_GROUP)
                    w_factor = _column_factors(
                        scales + ahead // SCALE_COLUMNS * stride_sk, to_up, w_columns, ONE_BLOCK, INTERLEAVED
                    )
                    acc += _product(x_tile, w_tile, tl.zeros_like(acc), SWAP, None) * factors
                else:
                    acc = _product(x_tile, w_tile, acc, SWAP, BK)

        sums = acc
        if SWAP:
            sums = tl.trans(sums)
        sums = sums.to(tl.float32)
        if SCALING == "row":
            sums *= tl.load(x_scale + sources * stride_sx)[:, None]
        if SUM_FACTOR != 1.0:
            sums *= SUM_FACTOR
        if w_row_scale is not None:
            sums *= tl.load(w_row_scale + expert * width * HALVES + w_rows)[None, :]
        if bias is not None:
            sums += tl.load(bias + expert * stride_be + w_rows * stride_bn).to(tl.float32)[None, :]
        if GATED:
            gate, up = tl.split(tl.reshape(sums, (BM, BN, 2)))
        else:
            gate = sums
            up = sums
        value = activate(gate, up, KIND, GATED, ALPHA, LIMIT, BETA, CLAMP_AFTER)
        if OUT_FACTOR != 1.0:
            value *= OUT_FACTOR
        out_columns = column_tile * BN + tl.arange(0, BN)
        places = place_in_planes(out_columns) if OUT_PLANES else out_columns
        pointers = out + rows.to(tl.int64)[:, None] * stride_out + places[None, :]
        if out_scale is None:
            value = narrow(value, out.dtype.element_ty)
        else:
            value = _rounded(
                value,
                rows,
                there,
                out_columns,
                out_scale,
                width,
                stride_os,
                BETWEEN,
                OUT_GROUP,
                CODE_MAX,
                CODE_MIN,
                out.dtype.element_ty,
            )
        tl.store(pointers, value, mask=there[:, None] & (out_columns[None, :] < width))
        if COUNTS_PROGRAMS:
            count_program(entry)
    if PDL and AWAITED:
        # So that launches end in their order.
        tl.extra.cuda.gdc_wait()
