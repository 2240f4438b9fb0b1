"""What the experts kernels are given once: the weights of both projections, and what comes between and after them.

Letters: `L` local experts, `N` outputs and `C` inputs of a projection.
"""

from __future__ import annotations

import attrs

from moe_core.kernels.quantize import ActivationRounder, activation_rounder
from moe_core.payloads import ActivationFn, PostNormFn, Tensor
from moe_core.quant import QuantScheme


@attrs.define(eq=False, kw_only=True)
class ExpertLinear:
    """The weights of one projection of all local experts.

    Attributes:
        weight: `[L, N, C]` in the stored form of `scheme`, any strides.
        scheme: How `weight` is stored, and what activations are rounded to.
        bias: `[L, N]` or None.
        scale: Scales of a quantized weight, None otherwise: `[L, N]` (or `[L, N, 1]`) per row, `[L, N, C / group]` per
            group, `[L, N / tile, C / tile]` (rounded up) per tile.
        row_scale: `[L, N]` fp32, one more multiplier of each output row (a global scale of its half), or None.
        input_scale: fp32 scalar of statically scaled activations, or None.
    """

    weight: Tensor
    scheme: QuantScheme
    bias: Tensor | None = None
    scale: Tensor | None = None
    row_scale: Tensor | None = None
    input_scale: Tensor | None = None
    #: Name of `scheme` in `SCHEMES`: what an operator can be given.
    scheme_name: str = attrs.field(init=False)
    #: What the scheme does to activations.
    round_activations: ActivationRounder = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Look both up once; a compiler should not have to follow it."""
        self.scheme_name = self.scheme.label
        self.round_activations = activation_rounder(self.scheme)

    @property
    def num_outputs(self) -> int:
        """Width `N` of the output rows."""
        return self.weight.shape[1]


@attrs.define(eq=False, kw_only=True)
class Experts:
    """Everything about the local experts that does not change between calls.

    Attributes:
        w13: First projection.
        w2: Second projection.
        activation: `[rows, 2I]` (`[rows, I]` when not gated) -> `[rows, I]`.
        post_norm: `[rows, H] -> [rows, H]` after the second projection and its bias, or None.
        weight_on_input: The router weight multiplies the input of the first projection; then not the output.
        deterministic: A token's result is the same bits alone, in any batch and in any order; CPU only.
    """

    w13: ExpertLinear
    w2: ExpertLinear
    activation: ActivationFn
    post_norm: PostNormFn | None = None
    weight_on_input: bool = False
    deterministic: bool = False
