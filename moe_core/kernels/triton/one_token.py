"""One token: its experts' weights are read once each, as matrix times vector, in two launches and without a sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_core.activation import ActivationSpec
from moe_core.kernels.triton.activation import activate, activation_constants
from moe_core.kernels.triton.interpreter import narrow
from moe_core.kernels.triton.launch import Constants, Launches, divided_up, is_aligned
from moe_core.kernels.triton.tiles import VectorTile
from moe_core.kernels.triton.weights import GroupedWeight, strides_of
from moe_core.payloads import Tensor


class OneToken:
    """The experts of a single token: matrix times vector, nothing rounded between token and result."""

    def __init__(
        self,
        w13: GroupedWeight,
        w2: GroupedWeight,
        activation: ActivationSpec,
        tiles: tuple[VectorTile, VectorTile],
        *,
        check: bool = False,
        pdl: bool = False,
    ) -> None:
        """What does not change between calls.

        Args:
            w13: First projection, unquantized.
            w2: Second projection, unquantized.
            activation: Between them.
            tiles: Of both launches.
            check: Stop the device on an id out of range.
            pdl: Start the second launch before the first has ended (see the package).
        """
        num_experts, self._hidden_size, self._inner = w2.data.shape[0], w2.num_rows, w2.num_inputs
        self._activation, self._tiles, self._check, self._pdl = activation, tiles, check, pdl
        self._first, self._second = Launches(_first_projection), Launches(_second_projection)
        self._w13, self._w2 = (w13.data, w13.bias), (w2.data, w2.bias)
        strides13, strides2 = ((*weight.data.stride()[:3], *strides_of(weight.bias, 2)) for weight in (w13, w2))
        self._panels = [{"PANEL": each.panel_rows, "PANEL_COLUMNS": each.panel_columns} for each in (w13, w2)]
        self._sizes13 = num_experts, self._inner, self._hidden_size, *strides13
        self._sizes2 = self._hidden_size, self._inner, *strides2

    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """`[1, H]` -> the weighted sum `[1, H]` of its experts.

        Args:
            hidden_states: `[1, H]`, contiguous.
            topk_ids: `[1, K]` local ids, -1 = no expert.
            topk_weights: `[1, K]`, used as fp32.
        """
        top_k = topk_ids.shape[1]
        inside = hidden_states.new_empty((top_k, self._inner), dtype=torch.float32)
        out = torch.empty_like(hidden_states)
        id_stride, weight_stride = topk_ids.stride(1), topk_weights.stride(1)
        key = (
            *(hidden_states.dtype, topk_ids.dtype, topk_weights.dtype, top_k, id_stride, weight_stride),
            *map(is_aligned, (hidden_states, topk_ids, topk_weights)),
        )
        first, second = self._tiles
        self._first(
            key,
            (divided_up(self._inner, first.n), top_k, 1),
            (inside, hidden_states, *self._w13, topk_ids, id_stride, *self._sizes13),
            self._first_constants,
        )
        self._second(
            key,
            (divided_up(self._hidden_size, second.n), 1, 1),
            (out, inside, *self._w2, topk_ids, topk_weights, id_stride, weight_stride, *self._sizes2),
            lambda: self._second_constants(top_k),
        )
        return out

    def _first_constants(self) -> Constants:
        tile, activation = self._tiles[0], self._activation
        constants = {
            "BN": tile.n,
            "BK": tile.k,
            "EVEN_K": self._hidden_size % tile.k == 0,
            **self._panels[0],
            "INTERLEAVED": not activation.gated or activation.row_order == "interleaved",
            "CHECK": self._check,
            "PDL": self._pdl,
            **activation_constants(activation),
        }
        # `debug` makes device assertions real; it would make additions checked ones too.
        options = {"num_warps": tile.num_warps, "debug": self._check, "sanitize_overflow": False}
        return constants, {**options, "launch_pdl": self._pdl}

    def _second_constants(self, top_k: int) -> Constants:
        tile = self._tiles[1]
        constants = {
            "TOP_K": top_k,
            "BN": tile.n,
            "BK": tile.k,
            "EVEN_K": self._inner % tile.k == 0,
            **self._panels[1],
            "PDL": self._pdl,
        }
        return constants, {"num_warps": tile.num_warps, "launch_pdl": self._pdl}


@triton.jit
def _row_places(rows, stride, PANEL: tl.constexpr, PANEL_COLUMNS: tl.constexpr):
    """Where rows begin inside an expert; `stride` is that of panels if there are any."""
    return rows // PANEL * stride + rows % PANEL * PANEL_COLUMNS if PANEL else rows * stride


@triton.jit
def _input_places(inputs, stride, PANEL_COLUMNS: tl.constexpr):
    """Where inputs lie inside a row."""
    return inputs // PANEL_COLUMNS * stride + inputs % PANEL_COLUMNS if PANEL_COLUMNS else inputs * stride


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
    PANEL: tl.constexpr,
    PANEL_COLUMNS: tl.constexpr,
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
    in_turns = columns % (width * HALVES)
    w_rows = in_turns if INTERLEAVED else (in_turns % 2) * width + in_turns // 2
    rows = in_turns if PANEL else w_rows
    base = w + expert * stride_we + _row_places(rows, stride_wn, PANEL, PANEL_COLUMNS)[:, None]
    acc = tl.zeros((BW, BK), dtype=tl.float32)
    for k in range(0, num_inputs, BK):
        inputs = k + tl.arange(0, BK)
        pointers = base + _input_places(inputs, stride_wk, PANEL_COLUMNS)[None, :]
        if EVEN_K:
            vector = tl.load(x + inputs)
            weight = tl.load(pointers)
        else:
            vector = tl.load(x + inputs, mask=inputs < num_inputs, other=0.0)
            weight = tl.load(pointers, mask=inputs[None, :] < num_inputs, other=0.0)
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
    PANEL: tl.constexpr,
    PANEL_COLUMNS: tl.constexpr,
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
            base = w + expert * stride_we + _row_places(w_rows, stride_wn, PANEL, PANEL_COLUMNS)[:, None]
            for k in range(0, num_inputs, BK):
                inputs = k + tl.arange(0, BK)
                pointers = base + _input_places(inputs, stride_wk, PANEL_COLUMNS)[None, :]
                if EVEN_K:
                    vector = tl.load(x + slot * num_inputs + inputs)
                    weight = tl.load(pointers)
                else:
                    there = inputs < num_inputs
                    vector = tl.load(x + slot * num_inputs + inputs, mask=there, other=0.0)
                    weight = tl.load(pointers, mask=there[None, :], other=0.0)
                acc += weight.to(tl.float32) * (vector * factor)[None, :]
            if bias is not None:
                total_bias += factor * tl.load(bias + expert * stride_be + w_rows * stride_bn).to(tl.float32)
    total = tl.sum(acc, axis=1) + total_bias
    tl.store(out + columns, narrow(total, out.dtype.element_ty), mask=columns < width)
