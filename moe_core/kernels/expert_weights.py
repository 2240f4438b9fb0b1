"""What the experts kernels are given once: the weights of both projections, and what comes between and after them.

Letters: `L` local experts, `N` outputs and `C` inputs of a projection.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from moe_core.kernels.activation_rounding import ActivationRounder
from moe_core.kernels.dequantize import Tile, WeightReader, num_columns
from moe_core.kernels.number_formats import movable
from moe_core.payloads import ActivationFn, PostNormFn, Tensor
from moe_core.quant import WHOLE, QuantScheme
from moe_core.vocabulary import FLOAT_DTYPES

#: Compute capabilities for which torch has a grouped GEMM that reads the sizes of groups on the device.
_GROUPED_GEMM_GENERATIONS = ((9, 0), (10, 0), (10, 3))
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

    def fetch(self, experts: Tensor) -> Tensor:
        """Weights `[k, N, C]` of the experts that `experts [k]` int64 names, without waiting for what it says.

        Plain floats as they are stored, others in fp32 without `output_scale`.
        """
        if not self.is_quantized:
            return self.weight.index_select(0, experts)
        weight = _of_experts(self.weight, experts)
        scale, zero_point = (None if t is None else _of_experts(t, experts) for t in (self.scale, self.zero_point))
        out = self.weight.new_empty((experts.shape[0] * self.num_outputs, self.num_inputs), dtype=torch.float32)
        WeightReader.of(weight, self.weight_dtype, self.tile, scale, zero_point).read(out, 0)
        return out.view(-1, self.num_outputs, self.num_inputs)


@attrs.define(eq=False, kw_only=True)
class ExpertLinear(StoredLinear):
    """A stored projection, and what is done to its inputs.

    Attributes:
        rounder: How activations are rounded before the product.
        input_scale: `[L]` fp32 of statically scaled activations, or None.
        fits_grouped_gemm: Whether torch's grouped GEMM takes these weights and reads the sizes of groups where they
            are: bf16, rows and columns of 16 bytes, on a CPU or on one of the GPUs that it is made for.
    """

    rounder: ActivationRounder
    input_scale: Tensor | None = None
    #: Found once: a compiler cannot look into a question to the device.
    fits_grouped_gemm: bool = attrs.field(init=False)

    @fits_grouped_gemm.default
    def _find_grouped_gemm(self) -> bool:
        weight = self.weight
        is_aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
        return weight.dtype == torch.bfloat16 and self.is_plain and is_aligned and has_grouped_gemm(weight.device)

    @property
    def is_plain(self) -> bool:
        """Whether floats are multiplied by floats, with nothing rounded before."""
        return not self.is_quantized and self.rounder.dtype == "same"

    @classmethod
    def of(cls, scheme: QuantScheme, weight: Tensor, **tensors: Any) -> ExpertLinear:
        """A projection of `scheme`; `weight` and the further tensors are the attributes of those names."""
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
        takes_blocks: Whether rows have to lie in blocks of one expert each (`blocks.py`): on accelerators, unless
            the grouped GEMM serves both projections.
    """

    w13: ExpertLinear
    w2: ExpertLinear
    activation: ActivationFn
    post_norm: PostNormFn | None = None
    weight_on_input: bool = False
    deterministic: bool = False
    takes_blocks: bool = attrs.field(init=False)

    @takes_blocks.default
    def _find_blocks(self) -> bool:
        grouped = self.w13.fits_grouped_gemm and self.w2.fits_grouped_gemm
        return self.w13.weight.device.type != "cpu" and not grouped

    @property
    def num_experts(self) -> int:
        """Local experts `L`."""
        return self.w13.weight.shape[0]


def has_grouped_gemm(device: torch.device) -> bool:
    """Whether `functional.grouped_mm` of bf16 does not wait for a device; for other generations torch reads sizes."""
    if device.type != "cuda":
        return device.type == "cpu"
    return torch.version.hip is None and torch.cuda.get_device_capability(device) in _GROUPED_GEMM_GENERATIONS


def _of_experts(values: Tensor, experts: Tensor) -> Tensor:
    return movable(values).index_select(0, experts).view(values.dtype)
