"""One token: its experts' weights are read once each, as matrix times vector, in two launches and without a sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_core.activation import ActivationSpec
from moe_core.kernels.triton.activation import activate, activation_constants
from moe_core.kernels.triton.interpreter import narrow
from moe_core.kernels.triton.tiles import VectorTile
from moe_core.kernels.triton.weights import GroupedWeight, strides_of
from moe_core.payloads import Tensor


def experts_of_one_token(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: GroupedWeight,
    w2: GroupedWeight,
    activation: ActivationSpec,
    tiles: tuple[VectorTile, VectorTile],
    *,
    check: bool = False,
    pdl: bool = False,
) -> Tensor:
    """`[1, H]` -> the weighted sum `[1, H]` of its experts; nothing is rounded between tokens and result.

    Args:
        hidden_states: `[1, H]`, contiguous.
        topk_ids: `[1, K]` local ids, -1 = no expert.
        topk_weights: `[1, K]`, used as fp32.
        w13: First projection, unquantized.
        w2: Second projection, unquantized.
        activation: Between them.
        tiles: Of both launches.
        check: Stop the device on an id out of range.
        pdl: Start the second launch before the first has ended (see the package).
    """
    top_k = topk_ids.shape[1]
    num_experts = w13.data.shape[0]
    inner, hidden_size = w2.data.shape[2], w2.data.shape[1]
    inside = hidden_states.new_empty((top_k, inner), dtype=torch.float32)
    out = hidden_states.new_empty((1, hidden_size))
    first, second = tiles
    _first_projection[(triton.cdiv(inner, first.n), top_k)](
        inside,
        hidden_states,
        w13.data,
        w13.bias,
        topk_ids,
        topk_ids.stride(1),
        num_experts,
        inner,
        hidden_size,
        *w13.data.stride(),
        *strides_of(w13.bias, 2),
        BN=first.n,
        BK=first.k,
        EVEN_K=hidden_size % first.k == 0,
        INTERLEAVED=not activation.gated or activation.row_order == "interleaved",
        CHECK=check,
        PDL=pdl,
        **activation_constants(activation),
        num_warps=first.num_warps,
        debug=check,
        sanitize_overflow=False,
        launch_pdl=pdl,
    )
    _second_projection[(triton.cdiv(hidden_size, second.n),)](
        out,
        inside,
        w2.data,
        w2.bias,
        topk_ids,
        topk_weights,
        topk_ids.stride(1),
        topk_weights.stride(1),
        hidden_size,
        inner,
        *w2.data.stride(),
        *strides_of(w2.bias, 2),
        TOP_K=top_k,
        BN=second.n,
        BK=second.k,
        EVEN_K=inner % second.k == 0,
        PDL=pdl,
        num_warps=second.num_warps,
        launch_pdl=pdl,
    )
    return out


@triton.jit
def _first_projection(
    out,
    x,
    w,
    bias,
    ids,
    stride_ids,
    num_experts,
    width,
    num_inputs,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    stride_bn,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CHECK: tl.constexpr,
    PDL: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BETA: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
):
    """Columns alternate, gate and up, as in `gemm`."""
    slot = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(ids + slot * stride_ids).to(tl.int64)
    if CHECK:
        tl.device_assert((expert >= -1) & (expert < num_experts), "topk_ids: an expert id is out of range")
    if expert < 0:
        return
    HALVES: tl.constexpr = 2 if GATED else 1
    BW: tl.constexpr = BN * HALVES
    columns = tl.program_id(0) * BW + tl.arange(0, BW)
    w_rows = columns % (width * HALVES)
    if not INTERLEAVED:
        w_rows = (w_rows % 2) * width + w_rows // 2
    base = w + expert * stride_we + w_rows[:, None] * stride_wn
    acc = tl.zeros((BW, BK), dtype=tl.float32)
    for k in range(0, num_inputs, BK):
        inputs = k + tl.arange(0, BK)
        if EVEN_K:
            vector = tl.load(x + inputs)
            weight = tl.load(base + inputs[None, :] * stride_wk)
        else:
            vector = tl.load(x + inputs, mask=inputs < num_inputs, other=0.0)
            weight = tl.load(base + inputs[None, :] * stride_wk, mask=inputs[None, :] < num_inputs, other=0.0)
        acc += weight.to(tl.float32) * vector.to(tl.float32)[None, :]
    total = tl.sum(acc, axis=1)
    if bias is not None:
        total += tl.load(bias + expert * stride_be + w_rows * stride_bn).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(total, (BN, 2)))
    else:
        gate = total
        up = total
    value = activate(gate, up, KIND, GATED, ALPHA, LIMIT, BETA, CLAMP_AFTER)
    out_columns = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(out + slot * width + out_columns, value, mask=out_columns < width)


@triton.jit
def _second_projection(
    out,
    x,
    w,
    bias,
    ids,
    weights,
    stride_ids,
    stride_weights,
    width,
    num_inputs,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    stride_bn,
    TOP_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """All experts of a few outputs, so that the weighted sum stays in registers."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    w_rows = columns % width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros((BN, BK), dtype=tl.float32)
    total_bias = tl.zeros((BN,), dtype=tl.float32)
    for slot in range(TOP_K):
        expert = tl.load(ids + slot * stride_ids).to(tl.int64)
        if expert >= 0:
            factor = tl.load(weights + slot * stride_weights).to(tl.float32)
            base = w + expert * stride_we + w_rows[:, None] * stride_wn
            for k in range(0, num_inputs, BK):
                inputs = k + tl.arange(0, BK)
                if EVEN_K:
                    vector = tl.load(x + slot * num_inputs + inputs)
                    weight = tl.load(base + inputs[None, :] * stride_wk)
                else:
                    there = inputs < num_inputs
                    vector = tl.load(x + slot * num_inputs + inputs, mask=there, other=0.0)
                    weight = tl.load(base + inputs[None, :] * stride_wk, mask=there[None, :], other=0.0)
                acc += weight.to(tl.float32) * (vector * factor)[None, :]
            if bias is not None:
                total_bias += factor * tl.load(bias + expert * stride_be + w_rows * stride_bn).to(tl.float32)
    total = tl.sum(acc, axis=1) + total_bias
    tl.store(out + columns, narrow(total, out.dtype.element_ty), mask=columns < width)
