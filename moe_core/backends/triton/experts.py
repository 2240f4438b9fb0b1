"""The Triton runners: both projections on each token format, bound to one route's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from moe_core.activation import ActivationSpec
from moe_core.backends.triton.device import Device, device_of
from moe_core.backends.triton.tiles import TilePair, TileTable
from moe_core.backends.triton.weights import Projection, operands_of, projection
from moe_core.kernels.checks import check_ids
from moe_core.kernels.triton.combine import combine
from moe_core.kernels.triton.gemm import grouped_gemm
from moe_core.kernels.triton.one_token import experts_of_one_token
from moe_core.kernels.triton.permute import gather_rows
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


def bind(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn | FusedFn:
    """The experts of one route, in the signature of its format."""
    request, format_ = plan.request, route.runner.spec.format
    quant = request.local_quant
    device = device_of(weights["w13"].device)
    w13, w2 = projection(weights, "13", quant.w13), projection(weights, "2", quant.w2)
    experts = TritonExperts(
        w13=w13,
        w2=w2,
        # A model's own callable sees the whole result of the first projection.
        activation=None if weights.activation is not None else request.activation,
        module=weights.activation,
        halves=request.activation.rows_per_channel,
        post_norm=weights.post_norm,
        # In the other formats the dispatcher applies the weights, on whichever side.
        weight_on_input=request.weight_on_input and format_ in ("standard", "fused"),
        row_dtype=torch.float32 if request.dtype == "fp16" else TORCH_DTYPES[request.dtype],
        check=format_ == "fused",
        device=device,
        table=TileTable(
            operands=operands_of(quant.w13, quant.w2),
            shared_bytes=device.shared_bytes,
            descriptors=device.tma and w13.weight.takes_descriptors() and w2.weight.takes_descriptors(),
        ),
    )
    bound: dict[str, Callable[..., Tensor]] = {
        "standard": experts.standard,
        "contiguous": experts.contiguous,
        "masked": experts.masked,
        "fused": experts.tokens,
    }
    return _on_device(weights["w13"].device, bound[format_])


def _on_device(device: torch.device, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` with `device` as the current one: kernels are launched there, wherever their tensors are."""
    if device.type == "cpu":
        return function

    def run(*arguments: Any) -> Tensor:
        with torch.cuda.device(device):
            return function(*arguments)

    return run


@attrs.define(eq=False, kw_only=True)
class TritonExperts:
    """Everything about the local experts that does not change between calls.

    Attributes:
        w13: First projection.
        w2: Second projection.
        activation: Between them, None if `module` is.
        module: The model's own callable, `[rows, 2I]` (`[rows, I]` when not gated) -> `[rows, I]`, or None.
        halves: Rows of `w13` per intermediate channel.
        post_norm: `[rows, H] -> [rows, H]` after the second projection, or None.
        weight_on_input: The router weight multiplies the input of the first projection; then not the output.
        row_dtype: Of the rows before they are summed; wider than fp16, whose largest number they may exceed.
        check: Whether nobody has looked at the ids before.
        device: What the kernels may use.
        table: Their tiles.
    """

    w13: Projection
    w2: Projection
    activation: ActivationSpec | None
    module: ActivationFn | None
    halves: int
    post_norm: PostNormFn | None
    weight_on_input: bool
    row_dtype: torch.dtype
    check: bool
    device: Device
    table: TileTable

    @property
    def num_experts(self) -> int:
        """Local experts `L`."""
        return self.w13.weight.data.shape[0]

    def standard(self, tokens: StandardTokens) -> Tensor:
        """Tokens as they came -> their weighted sums `[T, H]`."""
        return self.tokens(tokens.hidden_states, tokens.topk_ids, tokens.topk_weights)

    @torch.no_grad()
    def tokens(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """`[T, H]`, ids and weights `[T, K]` -> weighted sums `[T, H]` in the layer's dtype."""
        num_tokens = topk_ids.shape[0]
        if num_tokens == 0 or self.num_experts == 0:
            return torch.zeros_like(hidden_states)
        hidden_states = hidden_states.contiguous()
        on_device = self.check and hidden_states.device.type != "cpu"
        if self.check and not on_device:
            check_ids(topk_ids, self.num_experts)
        if num_tokens == 1 and self.activation is not None and self._is_plain():
            return experts_of_one_token(
                hidden_states,
                topk_ids,
                topk_weights,
                self.w13.weight,
                self.w2.weight,
                self.activation,
                self.table.one_token,
                check=on_device,
                pdl=self.device.pdl,
            )
        pair = self._tiles(topk_ids.numel())
        slots = sort_slots(topk_ids, self.num_experts, pair[0].m, check=on_device, pdl=self.device.pdl)
        rows = self._rows_of_tokens(hidden_states, slots, topk_weights, pair)
        weights = None if self.weight_on_input else topk_weights
        return combine(rows, slots.row_map, weights, hidden_states.dtype, pdl=self.device.pdl)

    @torch.no_grad()
    def contiguous(self, tokens: ContiguousTokens) -> Tensor:
        """Rows grouped by expert `[R, H]` -> unweighted rows of that shape; those past a count are undefined."""
        rows, counts = tokens.hidden_states, tokens.num_tokens_per_expert
        if rows.shape[0] == 0 or self.num_experts == 0:
            return torch.empty_like(rows)
        pair = self._tiles(rows.shape[0])
        tiles = group_tiles(counts, rows.shape[0], pair[0].m, group_ends=tokens.group_ends)
        return self._second(self._first(rows, tiles, pair), tiles, pair)

    @torch.no_grad()
    def masked(self, tokens: MaskedTokens) -> Tensor:
        """Blocks of rows `[L, M, H]` -> unweighted rows of that shape; those past `masked_m` are left alone."""
        rows = tokens.hidden_states.reshape(-1, tokens.hidden_states.shape[2])
        if rows.shape[0] == 0:
            return torch.empty_like(tokens.hidden_states)
        pair = self._tiles(tokens.expected_m * self.num_experts)
        tiles = group_tiles(tokens.masked_m, rows.shape[0], pair[0].m)
        out = self._second(self._first(rows, tiles, pair), tiles, pair)
        return out.view(*tokens.hidden_states.shape[:2], out.shape[1])

    def _is_plain(self) -> bool:
        """Whether nothing but weights in the layer's dtype, biases and a formula make this layer."""
        plain = self.w13.is_plain and self.w2.is_plain
        return plain and self.post_norm is None and not self.weight_on_input

    def _tiles(self, num_slots: int) -> TilePair:
        columns = self.w13.weight.block[1], self.w2.weight.block[1]
        return self.table.choose(num_slots, self.num_experts, self.halves, columns)

    def _rows_of_tokens(self, hidden_states: Tensor, slots: SortedSlots, weights: Tensor, pair: TilePair) -> Tensor:
        if self.weight_on_input or self.w13.input_scale is not None:
            # What a row is multiplied or divided by depends on its slot, so that a token is several rows.
            rows = gather_rows(hidden_states, slots, weights.contiguous() if self.weight_on_input else None)
            inside = self._first(rows, slots.tiles, pair)
        else:
            inside = self._first(hidden_states, slots.tiles, pair, slots)
        return self._second(inside, slots.tiles, pair)

    def _first(self, rows: Tensor, tiles: RowTiles, pair: TilePair, slots: SortedSlots | None = None) -> Tensor:
        """First projection and activation; with `slots`, of the tokens `rows` gathered on the way."""
        weight = self.w13.weight
        num_rows = rows.shape[0] if slots is None else slots.order.shape[0]
        width = weight.data.shape[1] // (self.halves if self.activation is not None else 1)
        inside = rows.new_empty((num_rows, width))
        # Tokens are rounded once each, rows where they are.
        operand, scale = self.w13.rounded(rows, tiles if slots is None else None)
        gather: dict[str, Any] = {} if slots is None else {"order": slots.order, "top_k": slots.row_map.shape[1]}
        grouped_gemm(
            operand,
            weight,
            tiles,
            inside,
            pair[0],
            activation=self.activation,
            row_scale=scale,
            row_group=self.w13.group,
            pdl=self.device.pdl,
            **gather,
        )
        return inside if self.module is None else self.module(inside)

    def _second(self, inside: Tensor, tiles: RowTiles, pair: TilePair) -> Tensor:
        """Second projection and what follows it, `[R, H]`."""
        operand, scale = self.w2.rounded(inside, tiles)
        out = inside.new_empty((inside.shape[0], self.w2.weight.data.shape[1]), dtype=self.row_dtype)
        grouped_gemm(
            operand,
            self.w2.weight,
            tiles,
            out,
            pair[1],
            row_scale=scale,
            row_group=self.w2.group,
            pdl=self.device.pdl,
        )
        return out if self.post_norm is None else self.post_norm(out)
