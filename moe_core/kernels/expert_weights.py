"""What the experts kernels are given once: the weights of both projections, and what comes between and after them.

Letters: `L` local experts, `N` outputs and `C` inputs of a projection.
"""

from __future__ import annotations

from typing import Any

import attrs

from moe_core.kernels.dequantize import Tile, WeightReader, num_columns
from moe_core.kernels.quantize import ActivationRounder
from moe_core.payloads import ActivationFn, PostNormFn, Tensor
from moe_core.quant import WHOLE, QuantScheme
from moe_core.vocabulary import FLOAT_DTYPES

#: Tile of weights without scales inside a row.
_ROW: Tile = (1, WHOLE)


@attrs.define(eq=False, kw_only=True)
class StoredLinear:
    """One projection of all local experts as it is stored: all that a product with given rows depends on.

    Attributes:
        weight: `[L, N, C]`, any strides; 4-bit elements uint8 `[L, N, C / 2]`.
        weight_dtype: Word of its elements.
        tile: Rows and columns that share an entry of `scale` and `zero_point`, `WHOLE` for an axis.
        scale: `[L, N / tile rows, C / tile columns]`, rounded up, as stored (exponent bytes as uint8); None where no
            scale is needed inside a row.
        zero_point: int8 of the same shape, `[L, N, 1]` without `scale`, or None.
        output_scale: `[L, N]` fp32, what multiplies the outputs (scales per row, per tensor and global), or None.
        bias: `[L, N]` or None.
    """

    weight: Tensor
    weight_dtype: str
    tile: Tile = _ROW
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    output_scale: Tensor | None = None
    bias: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        """Width `N` of the output rows."""
        return self.weight.shape[1]

    @property
    def num_inputs(self) -> int:
        """Width `C` of the input rows."""
        return num_columns(self.weight, self.weight_dtype)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is anything else than plain floats."""
        return self.weight_dtype not in FLOAT_DTYPES

    def reader(self, expert: int) -> WeightReader:
        """One expert's weight in fp32, without `output_scale`, block by block."""
        scale, zero_point = (None if t is None else t[expert] for t in (self.scale, self.zero_point))
        return WeightReader.of(self.weight[expert], self.weight_dtype, self.tile, scale, zero_point)


@attrs.define(eq=False, kw_only=True)
class ExpertLinear(StoredLinear):
    """A stored projection, and what is done to its inputs.

    Attributes:
        rounder: How activations are rounded before the product.
        input_scale: `[L]` fp32 of statically scaled activations, or None.
    """

    rounder: ActivationRounder
    input_scale: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether floats are multiplied by floats, with nothing rounded before."""
        return not self.is_quantized and self.rounder.dtype == "same"

    @classmethod
    def of(cls, scheme: QuantScheme, weight: Tensor, **tensors: Any) -> ExpertLinear:
        """A projection of `scheme`; the further tensors are those of `StoredLinear`, and `input_scale`."""
        block = scheme.weight_block
        return cls(
            weight=weight,
            weight_dtype=scheme.weight_dtype,
            tile=block if isinstance(block, tuple) and not scheme.scales_whole_rows else _ROW,
            rounder=ActivationRounder.of(scheme),
            **tensors,
        )


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
