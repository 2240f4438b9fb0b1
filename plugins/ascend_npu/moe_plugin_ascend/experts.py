"""Runner `ascend`: both projections of the local experts on rows grouped by expert, bound to prepared weights.

Letters: `R` rows, `L` local experts, `H` hidden, `I` intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from moe_core.kernels.activation import activation_function
from moe_core.payloads import ActivationFn, ContiguousTokens, ExpertsFn, PostNormFn, PreparedWeights, Tensor
from moe_core.plan import MoEPlan, Route
from moe_plugin_ascend.operators import (
    Groups,
    grouped_matmul,
    require_operators,
    round_rows,
    swiglu,
    swiglu_int8,
)
from moe_plugin_ascend.steps import Steps
from moe_plugin_ascend.weights import prepare

__all__ = ["bind", "prepare"]

#: dtype of the codes that a kernel multiplies; `quint4x2` is torch's name for eight int4 in a word.
_CODES = {"w8a8": torch.int8, "w4a8": torch.int8, "w4a4": torch.quint4x2}


def bind(plan: MoEPlan, route: Route, weights: PreparedWeights) -> ExpertsFn:
    """The experts of one route."""
    require_operators()
    request, steps = plan.request, Steps.of(plan.request)
    experts = AscendExperts(
        w13=_projection(weights, "w13", steps.first),
        w2=_projection(weights, "w2", steps.second),
        steps=steps,
        activation=swiglu if steps.is_plain else weights.activation or activation_function(request.activation),
        post_norm=weights.post_norm,
        is_padded=route.row_alignment > 1,
    )
    return experts


@attrs.frozen(eq=False)
class Projection:
    """One projection as `npu_grouped_matmul` takes it.

    Attributes:
        weight: `[L, K, N]`, or int32 words `[L, K, N / 8]` of int4.
        codes: dtype that its inputs are rounded to, None for bf16.
        scale: As `weights` made it, or None.
        bias: fp32 `[L, N]` or None.
    """

    weight: Tensor
    codes: torch.dtype | None
    scale: Tensor | None
    bias: Tensor | None

    def rounded(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """bf16 rows `[R, K]` as this projection reads them, and the scale of each, fp32 `[R]`; None if bf16."""
        return (rows, None) if self.codes is None else round_rows(rows, self.codes)

    def __call__(self, rows: Tensor, row_scale: Tensor | None, groups: Groups) -> Tensor:
        """bf16 `[R, N]`."""
        return grouped_matmul(
            rows, self.weight, groups, torch.bfloat16, scale=self.scale, row_scale=row_scale, bias=self.bias
        )

    def sums(self, rows: Tensor, groups: Groups) -> Tensor:
        """int32 `[R, N]`, before any scale."""
        return grouped_matmul(rows, self.weight, groups, torch.int32)


def _projection(weights: PreparedWeights, name: str, kernel: str) -> Projection:
    stored = weights[name]
    # A view in both cases: tiles and bytes stay where they are.
    views: dict[str, Callable[[], Tensor]] = {
        "bf16": lambda: stored.mT,
        "w8a8": lambda: stored,
        "w4a8": lambda: stored.view(torch.int32),
        "w4a4": lambda: stored.view(torch.int32),
    }
    return Projection(views[kernel](), _CODES.get(kernel), weights.get(f"{name}_scale"), weights.get(f"{name}_bias"))


@attrs.frozen(eq=False, kw_only=True)
class AscendExperts:
    """Everything about the local experts that does not change between calls.

    Attributes:
        w13: First projection.
        w2: Second projection.
        steps: Which operators lie between them.
        activation: Between the projections where no fused operator is: `[R, 2I]` -> `[R, I]`.
        post_norm: After the second, or None.
        is_padded: Whether groups end later than their rows.
    """

    w13: Projection
    w2: Projection
    steps: Steps
    activation: ActivationFn
    post_norm: PostNormFn | None
    is_padded: bool

    @torch.no_grad()
    def __call__(self, tokens: ContiguousTokens) -> Tensor:
        """Rows `[R, H]` -> unweighted bf16 `[R, H]`; those past the counts are undefined."""
        rows, row_scale = tokens.hidden_states, tokens.scales
        if rows.shape[0] == 0:
            return rows.new_empty(rows.shape, dtype=torch.bfloat16)
        groups = self._groups(tokens)
        if row_scale is None:
            rows, row_scale = self.w13.rounded(rows)
        inside, inside_scale = self._inside(rows, row_scale, groups)
        out = self.w2(inside, inside_scale, groups)
        return out if self.post_norm is None else self.post_norm(out)

    def _inside(self, rows: Tensor, row_scale: Tensor | None, groups: Groups) -> tuple[Tensor, Tensor | None]:
        """What the second projection reads."""
        if self.steps.keeps_sums:
            return swiglu_int8(self.w13.sums(rows, groups), groups.sizes, self.w13.scale, row_scale)
        hidden = self.w13(rows, row_scale, groups)
        if self.steps.is_fused:
            return swiglu_int8(hidden, groups.sizes)
        return self.w2.rounded(self.activation(hidden))

    def _groups(self, tokens: ContiguousTokens) -> Groups:
        """Counts where the groups lie back to back; the GEMM refuses counts of one expert, and then takes its end."""
        counts, ends = tokens.num_tokens_per_expert.to(torch.int64), tokens.group_ends.to(torch.int64)
        if self.is_padded:
            return Groups(torch.diff(ends, prepend=ends.new_zeros(1)), ends)
        return Groups(counts, ends if counts.shape[0] == 1 else None)
