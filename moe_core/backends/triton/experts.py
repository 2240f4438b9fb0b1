"""The Triton runners: both projections on each token format, bound to one route's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import attrs
import torch

from moe_core.backends.triton.device import Device, device_of
from moe_core.backends.triton.tiles import TilePair, TileTable
from moe_core.backends.triton.weights import Projection, operands_of, projection
from moe_core.kernels.checks import check_ids
from moe_core.kernels.on_device import launching_on
from moe_core.kernels.triton.combine import combine
from moe_core.kernels.triton.gemm import GroupedGemm
from moe_core.kernels.triton.launch import divided_up
from moe_core.kernels.triton.one_token import OneToken
from moe_core.kernels.triton.permute import gather_rows
from moe_core.kernels.triton.planes import rows_in_planes
from moe_core.kernels.triton.sort import RowTiles, SortedSlots, group_tiles, sort_slots
from moe_core.payloads import (
    TORCH_DTYPES,
    ActivationFn,
    ContiguousTokens,
    ExpertsFn,
    FusedFn,
    MaskedTokens,
    PostNormFn,
    PreparedWeights,
    StandardTokens,
    Tensor,
)
from moe_core.plan import MoEPlan, Route
from moe_core.request import LayerRequest

#: Of float rows between the projections of an fp16 layer: fp16 then holds what is up to 1,048,064, as large as any
#: that was found in a model, and rows of 1e-3 on average still lose less than in bf16. A power of two rounds nothing.
_INSIDE_FP16 = 2.0**-4


def bind(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn | FusedFn:
    """The experts of one route, in the signature of its format."""
    format_ = route.runner.spec.format
    experts = _experts(plan.request, format_, weights)
    bound: dict[str, Callable[..., Tensor]] = {
        "standard": experts.standard,
        "contiguous": experts.contiguous,
        "masked": experts.masked,
        "fused": experts.tokens,
    }
    return launching_on(weights["w13"].device, bound[format_])


def _experts(request: LayerRequest, format_: str, weights: PreparedWeights) -> TritonExperts:
    quant, is_cpu = request.local_quant, weights["w13"].device.type == "cpu"
    device = device_of(weights["w13"].device)
    w13, w2 = projection(weights, "w13", quant.w13), projection(weights, "w2", quant.w2)
    # A model's own callable sees the whole result of the first projection.
    activation = None if weights.activation is not None else request.activation
    # In the other formats the dispatcher applies the weights, on whichever side.
    weight_on_input = request.weight_on_input and format_ in ("standard", "fused")
    dtype = TORCH_DTYPES[request.dtype]
    row_dtype = torch.float32 if request.dtype == "fp16" else dtype
    # Nobody has looked at the ids before a fused runner; on a GPU its first kernel does.
    is_unchecked = format_ == "fused"
    table = _tile_table(request, format_, device, w13, w2, row_dtype)
    inside_factor = _INSIDE_FP16 if request.dtype == "fp16" and w2.rounds_to is None else 1.0
    one_token = None
    # Nothing but weights in the layer's dtype, biases and a formula.
    if activation is not None and w13.is_plain and w2.is_plain and weights.post_norm is None and not weight_on_input:
        check = is_unchecked and not is_cpu
        one_token = OneToken(w13.weight, w2.weight, activation, table.one_token, check=check, pdl=device.pdl)
    gemm = partial(GroupedGemm, multiprocessors=device.multiprocessors, pdl=device.pdl)
    return TritonExperts(
        num_experts=w13.weight.data.shape[0],
        w13=w13,
        w2=w2,
        first=gemm(
            w13.weight,
            activation=activation,
            row_group=w13.group,
            rounded_from=row_dtype,
            rounded_group=0 if activation is None else w2.rounded_group,
            out_factor=1.0 if activation is None else inside_factor,
        ),
        second=gemm(w2.weight, row_group=w2.group, sum_factor=1.0 / inside_factor),
        one_token=one_token,
        module=_without_gradients(weights.activation),
        inside_factor=inside_factor,
        post_norm=_without_gradients(weights.post_norm),
        weight_on_input=weight_on_input,
        dtype=dtype,
        row_dtype=row_dtype,
        check_on_host=is_unchecked and is_cpu,
        check_on_device=is_unchecked and not is_cpu,
        pdl=device.pdl,
        table=table,
    )


def _tile_table(
    request: LayerRequest, format_: str, device: Device, w13: Projection, w2: Projection, row_dtype: torch.dtype
) -> TileTable:
    # Blocks have rows that are none, and all of them would be put in the order of planes.
    in_planes = device.planes and format_ in ("standard", "fused") and request.dtype == "bf16"
    in_planes = in_planes and w13.takes_planes() and w2.takes_planes()
    return TileTable(
        operands="planes" if in_planes else operands_of(request.local_quant.w13, request.local_quant.w2),
        device_name=device.name,
        shared_bytes=device.shared_bytes,
        descriptors=device.tma and w13.weight.takes_descriptors() and w2.weight.takes_descriptors(),
        halves=request.activation.rows_per_channel,
        wide_results=row_dtype.itemsize > 2,
        block_columns=(w13.weight.block[1], w2.weight.block[1]),
        panels=w13.weight.panel_rows > 0,
    )


def _without_gradients(function: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
    """A model's own callable, whose parameters may want gradients."""
    return None if function is None else torch.no_grad()(function)


class _Inside(NamedTuple):
    """The first projection's result, as the second one reads it.

    Attributes:
        rows: `[R, I]`, floats or codes.
        scale: fp32 `[R, groups]` of codes, None for floats.
        awaited: Programs that have counted themselves in a tile before it is multiplied; 0 to wait for their launch.
        in_use: What launches read that may still run when the second one begins to write: were it given back before
            room for its result is taken, that might be the same memory.
    """

    rows: Tensor
    scale: Tensor | None
    awaited: int
    in_use: tuple[Tensor | None, ...]


@attrs.define(eq=False, kw_only=True)
class TritonExperts:
    """Everything about the local experts that does not change between calls.

    Attributes:
        num_experts: Local experts `L`.
        w13: First projection.
        w2: Second projection.
        first: The launches of the first one, with the activation unless `module` is one.
        second: The launches of the second one.
        one_token: Both for a single token, None for layers that need more than weights, biases and a formula.
        module: The model's own callable, `[rows, 2I]` (`[rows, I]` when not gated) -> `[rows, I]`, or None.
        inside_factor: What multiplies rows between the projections; the second one makes up for it.
        post_norm: `[rows, H] -> [rows, H]` after the second projection, or None.
        weight_on_input: The router weight multiplies the input of the first projection; then not the output.
        dtype: Of the layer.
        row_dtype: Of rows before they are summed, rounded to codes or given to `module`; wider than fp16, whose
            largest number they may exceed.
        check_on_host: Whether ids are checked before any launch, which reads them.
        check_on_device: Whether the first launch checks them.
        pdl: Whether a launch may start before the one in front of it has ended.
        table: Their tiles.
    """

    num_experts: int
    w13: Projection
    w2: Projection
    first: GroupedGemm
    second: GroupedGemm
    one_token: OneToken | None
    module: ActivationFn | None
    inside_factor: float
    post_norm: PostNormFn | None
    weight_on_input: bool
    dtype: torch.dtype
    row_dtype: torch.dtype
    check_on_host: bool
    check_on_device: bool
    pdl: bool
    table: TileTable

    def standard(self, tokens: StandardTokens) -> Tensor:
        """Tokens as they came -> their weighted sums `[T, H]`."""
        return self.tokens(tokens.hidden_states, tokens.topk_ids, tokens.topk_weights, tokens.expected_m)

    def tokens(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, expected_m: int | None = None
    ) -> Tensor:
        """`[T, H]`, ids and weights `[T, K]` -> weighted sums `[T, H]` in the layer's dtype.

        `expected_m` is as in `StandardTokens`.
        """
        num_tokens = topk_ids.shape[0]
        if num_tokens == 0 or self.num_experts == 0:
            return torch.zeros_like(hidden_states)
        hidden_states = hidden_states.contiguous()
        if self.check_on_host:
            check_ids(topk_ids, self.num_experts)
        if num_tokens == 1 and self.one_token is not None:
            return self.one_token(hidden_states, topk_ids, topk_weights)
        pair = self.table.choose(topk_ids.numel() / self.num_experts if expected_m is None else expected_m)
        slots = sort_slots(topk_ids, self.num_experts, pair[0].m, check=self.check_on_device, pdl=self.pdl)
        if expected_m is not None:
            slots.tiles.usual = self._usual_tiles(expected_m, pair)
        rows = self._rows_of_tokens(hidden_states, slots, topk_weights, pair)
        weights = None if self.weight_on_input else topk_weights
        return combine(rows, slots.row_map, weights, hidden_states.dtype, pdl=self.pdl)

    def contiguous(self, tokens: ContiguousTokens) -> Tensor:
        """Rows grouped by expert `[R, H]` -> unweighted rows of that shape; those past a count are undefined."""
        rows, counts = tokens.hidden_states, tokens.num_tokens_per_expert
        if rows.shape[0] == 0 or self.num_experts == 0:
            return torch.empty_like(rows)
        pair = self.table.choose(rows.shape[0] / self.num_experts)
        tiles = group_tiles(counts, rows.shape[0], pair[0].m, group_ends=tokens.group_ends)
        return self._second(self._first(rows, tiles, pair), tiles, pair)

    def masked(self, tokens: MaskedTokens) -> Tensor:
        """Blocks of rows `[L, M, H]` -> unweighted rows of that shape; those past `masked_m` are left alone."""
        rows = tokens.hidden_states.reshape(-1, tokens.hidden_states.shape[2])
        if rows.shape[0] == 0:
            return torch.empty_like(tokens.hidden_states)
        pair = self.table.choose(tokens.expected_m)
        tiles = group_tiles(tokens.masked_m, rows.shape[0], pair[0].m)
        tiles.usual = self._usual_tiles(tokens.expected_m, pair)
        out = self._second(self._first(rows, tiles, pair), tiles, pair)
        return out.view(*tokens.hidden_states.shape[:2], out.shape[1])

    def _usual_tiles(self, expected_m: int, pair: TilePair) -> int:
        """Tiles of rows, where some experts have twice as many rows as they are expected to have."""
        return self.num_experts * divided_up(2 * expected_m, pair[0].m)

    def _rows_of_tokens(self, hidden_states: Tensor, slots: SortedSlots, weights: Tensor, pair: TilePair) -> Tensor:
        # What a row is multiplied or divided by may depend on its slot, so that a token is several rows.
        if self.weight_on_input or self.w13.input_scale is not None:
            on_input = weights.contiguous() if self.weight_on_input else None
            # Codes that are made of rows that were rounded before would be others.
            is_rounded_later = on_input is not None and self.w13.rounds_to is not None
            rows = gather_rows(hidden_states, slots, on_input, torch.float32 if is_rounded_later else None)
            inside = self._first(rows, slots.tiles, pair)
        else:
            inside = self._first(hidden_states, slots.tiles, pair, slots)
        return self._second(inside, slots.tiles, pair)

    def _first(self, rows: Tensor, tiles: RowTiles, pair: TilePair, slots: SortedSlots | None = None) -> _Inside:
        """First projection and activation; with `slots`, of `rows` that are tokens."""
        num_rows, tile = rows.shape[0] if slots is None else slots.order.shape[0], pair[0]
        # Tokens are rounded once each, rows where they are. Sorting, which may still run, does not write tokens.
        early = self.pdl and slots is not None
        operand, scale = self.w13.rounded(rows, tiles if slots is None else None, pdl="write" if early else "")
        if tile.planes:
            operand = rows_in_planes(operand, pdl=early)
        gather: dict[str, Any] = {} if slots is None else {"order": slots.order, "top_k": slots.row_map.shape[1]}
        rounds, size = self.first.rounds(tile), (num_rows, self.first.width)
        floats = self.dtype if self.w2.rounds_to is None and self.module is None else self.row_dtype
        inside = rows.new_empty(size, dtype=self.w2.rounds_to if rounds else floats)
        inside_scale = self.w2.new_scale(inside) if rounds else None
        before_rounding, awaited = self._awaited(pair)
        self.first(
            *(operand, tiles, inside, tile),
            row_scale=scale,
            out_planes=pair[1].planes and self.module is None,
            out_scale=inside_scale,
            counts_programs=before_rounding > 0,
            **gather,
        )
        in_use = operand, scale, inside
        if rounds:
            return _Inside(inside, inside_scale, awaited, in_use)
        if self.module is not None:
            inside = self._activated(inside, self.module)
            if pair[1].planes:
                inside = rows_in_planes(inside)
        rounded = self.w2.rounded(inside, tiles, pdl="read" if self.pdl else "", awaited=before_rounding)
        return _Inside(*rounded, awaited, in_use)

    def _activated(self, rows: Tensor, module: ActivationFn) -> Tensor:
        """What `module` makes of the first projection's result, in the dtype that the second one takes."""
        rows = module(rows)
        if self.inside_factor == 1.0:
            return rows
        return torch.mul(rows, self.inside_factor, out=rows.new_empty(rows.shape, dtype=self.dtype))

    def _awaited(self, pair: TilePair) -> tuple[int, int]:
        """Programs that have counted themselves in a tile before its rows are rounded, and before they are multiplied.

        Both are 0 where launches wait for the end of the one in front of them.
        """
        first, second = pair
        # A compiler plans memory as if launches ended one after the other (`_Inside.in_use`).
        if self.module is not None or not second.own_rows or torch.compiler.is_compiling():
            return 0, 0
        programs = divided_up(self.first.width, first.n)
        own_launch = 0 if self.first.rounds(first) else self.w2.programs_per_tile(first.m, self.first.width)
        return programs, programs + own_launch

    def _second(self, inside: _Inside, tiles: RowTiles, pair: TilePair) -> Tensor:
        """Second projection and what follows it, `[R, H]`."""
        rows = inside.rows
        out = rows.new_empty((rows.shape[0], self.second.width), dtype=self.row_dtype)
        self.second(rows, tiles, out, pair[1], row_scale=inside.scale, awaited=inside.awaited)
        return out if self.post_norm is None else self.post_norm(out)
