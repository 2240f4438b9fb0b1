"""Runner `deep_gemm`: both projections of the local experts, bound to one route's prepared weights.

Letters: `R` rows, `M` rows per expert, `L` local experts, `H` hidden, `I` intermediate size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch

from moe_core.activation import ActivationSpec
from moe_core.errors import PluginError, WeightsError
from moe_core.kernels import ops
from moe_core.kernels.on_device import on_device
from moe_core.payloads import (
    ActivationFn,
    ContiguousTokens,
    ExpertsFn,
    MaskedTokens,
    PostNormFn,
    PreparedWeights,
    Tensor,
)
from moe_core.plan import MoEPlan, Route
from moe_core.specs import RunnerSpec, TokenDtype
from moe_plugin_deepgemm.library import (
    ENDS_KEYWORD,
    GroupedGemm,
    grouped_gemm,
    require_row_alignment,
    takes_group_ends,
)
from moe_plugin_deepgemm.runner_specs import ROW_ALIGNMENT, UE8M0
from moe_plugin_deepgemm.weights import is_readable, prepare

__all__ = ["bind", "prepare"]

#: Rows of both operands, and channels, that share a scale: of fp32 scales as stored, and of packed ones, which have
#: every row's own.
_RECIPES = {"column_128": (1, 128, 128), "ue8m0_128": (1, 1, 128)}

#: By ends, absent rows cost nothing, and finding a tile's group costs the more the more groups there are: fp8 is faster
#: by row only above so many experts, with so many rows of each, padding included. Both GEMMs by end and by row, in us:
#: 512 experts of 287 rows 3534 and 3328 on an H200, 4829 and 4169 on an H100; 512 of 207 rows 1961 and 2659, 256 of 383
#: rows 6163 and 7092, 128 of 639 rows 603 and 618 on an H200.
_FEW_EXPERTS, _MANY_ROWS = 256, 256
#: Contiguous tokens, and each row's expert (-1: none) -> the keywords that tell the library which rows are whose.
TellGroups: TypeAlias = Callable[[ContiguousTokens, Tensor], dict[str, Any]]


def by_row(tokens: ContiguousTokens, of_rows: Tensor) -> dict[str, Any]:
    """Each row's expert, `of_rows` int32 `[R]`, which every build takes."""
    return {"grouped_layout": of_rows}


def by_end(tokens: ContiguousTokens, of_rows: Tensor) -> dict[str, Any]:
    """int32 `[L]`, the row after each expert's last real one: rows past the last group are then not computed.

    On GPUs these are many, since the number of rows is a bound.
    """
    # The remainder by a negative number is what a group lacks to a whole tile, below zero.
    ends = tokens.group_ends + tokens.num_tokens_per_expert % -ROW_ALIGNMENT
    return {"grouped_layout": ends, ENDS_KEYWORD: True}


def by_end_of_few(tokens: ContiguousTokens, of_rows: Tensor) -> dict[str, Any]:
    """Of fp8 operands, whose kernel is slower by ends where many groups of more than a tile have to be looked for."""
    num_experts = tokens.group_ends.shape[0]
    is_slow = num_experts > _FEW_EXPERTS and of_rows.shape[0] >= _MANY_ROWS * num_experts
    return (by_row if is_slow else by_end)(tokens, of_rows)


def bind(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """The experts of one route, after a call of each projection that compiles it.

    Raises:
        PluginError: The library is not what its version promises, or does not compile.
        WeightsError: Weights that it cannot read.
    """
    spec, request = route.runner.spec, plan.request
    codes = _codes(spec)
    gemm = grouped_gemm("bf16" if codes is None else "fp8", spec.format)
    is_contiguous = spec.format == "contiguous"
    alignment = require_row_alignment(route.row_alignment) if is_contiguous else ROW_ALIGNMENT
    recipe = {} if codes is None else {"recipe": _RECIPES[codes.scales]}
    experts = DeepGemmExperts(
        format=spec.format,
        w13=Projection(gemm, _operand(weights, "w13", codes, spec), recipe),
        w2=Projection(gemm, _operand(weights, "w2", codes, spec), recipe),
        codes=codes,
        activation=request.activation,
        module=weights.activation,
        post_norm=weights.post_norm,
        device=weights["w13"].device,
    )
    if is_contiguous and alignment == route.row_alignment == ROW_ALIGNMENT and takes_group_ends(gemm):
        # A build that has the keyword may refuse it when it is called.
        with contextlib.suppress(Exception):
            attrs.evolve(experts, tell_groups=by_end).compile(ROW_ALIGNMENT)
            experts = attrs.evolve(experts, tell_groups=by_end if codes is None else by_end_of_few)
    try:
        # By end everything is compiled by now.
        if experts.tell_groups is not by_end:
            experts.compile(ROW_ALIGNMENT)
    except Exception as error:
        raise PluginError(
            f"runner {route.runner.full_name}: deep_gemm could not compile or run its kernels for weights "
            f"{list(weights['w13'].shape)} and {list(weights['w2'].shape)}: {type(error).__name__}: {error}"
        ) from error
    return experts


def _codes(spec: RunnerSpec) -> TokenDtype | None:
    """What the projections read beside quantized weights; None for floats."""
    return spec.reads[0] if spec.reads[0].dtype == "fp8" else None


def _operand(weights: PreparedWeights, name: str, codes: TokenDtype | None, spec: RunnerSpec) -> Any:
    """A weight, with its scales if it has some, as the library takes it."""
    wanted = [name] if codes is None else [name, f"{name}_scale"]
    for tensor in wanted:
        data = weights[tensor]
        packed = spec.weight_layout == UE8M0 and tensor != name
        if not is_readable(data.mT if packed else data):
            raise WeightsError(
                f"deep_gemm reads {tensor} {list(data.shape)} row by row from memory of its own, these have strides "
                f"{list(data.stride())}: let the plugin cuda_deepgemm prepare the layer, by pinning runner deep_gemm"
            )
    return weights[name] if codes is None else (weights[name], weights[f"{name}_scale"])


@attrs.frozen(eq=False)
class Projection:
    """One projection.

    Attributes:
        gemm: The library's function for the format.
        weight: `[L, N, K]`; of fp8 with scales fp32 `[L, N/128, K/128]` or packed int32 `[L, N, K/512]`.
        options: Further keywords.
    """

    gemm: GroupedGemm
    weight: Any
    options: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int, int]:
        """`L, N, K`."""
        return tuple((self.weight[0] if isinstance(self.weight, tuple) else self.weight).shape)

    def __call__(self, rows: Any, groups: dict[str, Any]) -> Tensor:
        """Rows `[..., K]`, of fp8 with their scales -> bf16 `[..., N]`; rows that do not exist stay unwritten."""
        values = rows[0] if isinstance(rows, tuple) else rows
        out = torch.empty((*values.shape[:-1], self.shape[1]), dtype=torch.bfloat16, device=values.device)
        self.gemm(a=rows, b=self.weight, d=out, **groups, **self.options)
        return out


@attrs.frozen(eq=False, kw_only=True)
class DeepGemmExperts:
    """Everything about the local experts that does not change between calls.

    Attributes:
        format: `contiguous` or `masked`.
        w13: First projection.
        w2: Second projection.
        codes: What both read beside fp8 weights, None for bf16.
        activation: Between them, unless `module` is.
        module: The model's own callable, `[rows, 2I]` (`[rows, I]` when not gated) -> `[rows, I]`, or None.
        post_norm: `[rows, H] -> [rows, H]` after the second projection, or None.
        device: Where the weights are: the library launches on the current device.
        tell_groups: What the library is told about contiguous rows.
    """

    format: str
    w13: Projection
    w2: Projection
    codes: TokenDtype | None
    activation: ActivationSpec
    module: ActivationFn | None
    post_norm: PostNormFn | None
    device: torch.device
    tell_groups: TellGroups = by_row

    @torch.no_grad()
    def __call__(self, tokens: ContiguousTokens | MaskedTokens) -> Tensor:
        """Rows `[R, H]` or `[L, M, H]` -> unweighted bf16 rows of that shape; those that do not exist are undefined."""
        rows = tokens.hidden_states
        if rows.numel() == 0:
            return rows.new_empty(rows.shape, dtype=torch.bfloat16)
        with on_device(self.device):
            if isinstance(tokens, MaskedTokens):
                groups = {"masked_m": tokens.masked_m, "expected_m": max(1, tokens.expected_m)}
                return self._run(rows, tokens.scales, tokens.masked_m, groups)
            of_rows = ops.row_experts(tokens.num_tokens_per_expert, tokens.group_ends, rows.shape[0])
            return self._run(rows, tokens.scales, of_rows, self.tell_groups(tokens, of_rows))

    def _run(self, rows: Tensor, scales: Tensor | None, real: Tensor, groups: dict[str, Any]) -> Tensor:
        hidden = self.w13(self._rounded(rows, scales, real), groups)
        out = self.w2(self._inside(hidden, real), groups)
        return out if self.post_norm is None else self.post_norm(out.flatten(0, -2)).view(out.shape)

    def _rounded(self, rows: Tensor, scales: Tensor | None, real: Tensor) -> Any:
        """Tokens as the first projection reads them; those from a dispatcher may be codes already."""
        if self.codes is None:
            return rows
        return (rows, scales) if scales is not None else ops.quantize(rows, self.codes, real=real)

    def _inside(self, hidden: Tensor, real: Tensor) -> Any:
        """What the second projection reads: the activation, and its codes from the same pass."""
        if self.module is None:
            if self.codes is None:
                return ops.activate(hidden, self.activation, real=real)
            return ops.quantize(hidden, self.codes, activation=self.activation, real=real)
        inside = self.module(hidden.flatten(0, -2)).view(*hidden.shape[:-1], self.w2.shape[2])
        return inside if self.codes is None else ops.quantize(inside, self.codes, real=real)

    @torch.no_grad()
    def compile(self, num_rows: int) -> None:
        """Run both projections without any row: what was not compiled for this size before is compiled.

        Args:
            num_rows: Contiguous rows, a multiple of 128; masked, what to expect of an expert.
        """
        with on_device(self.device):
            for projection in (self.w13, self.w2):
                projection(*self._nothing(projection, num_rows))

    def _nothing(self, projection: Projection, num_rows: int) -> tuple[Any, dict[str, Any]]:
        """Rows of zeros of which none exists, and the arguments that say so."""
        num_experts, _, width = projection.shape
        is_masked = self.format == "masked"
        shape = (num_experts, ROW_ALIGNMENT, width) if is_masked else (num_rows, width)
        rows: Any = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        none = torch.zeros(num_experts, dtype=torch.int32, device=self.device)
        if self.codes is not None:
            rows = ops.quantize(rows, self.codes)
        if is_masked:
            return rows, {"masked_m": none, "expected_m": num_rows}
        tokens = ContiguousTokens(hidden_states=rows, num_tokens_per_expert=none, group_ends=none)
        return rows, self.tell_groups(tokens, none.new_full((num_rows,), -1))
