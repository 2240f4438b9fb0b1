"""Prepared weights as the grouped GEMM takes them, and what their schemes do to the rows they multiply."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from moe_core.errors import WeightsError
from moe_core.kernels.number_formats import E2M1_MAX, E4M3_MAX, scale_values
from moe_core.kernels.triton.launch import divided_up
from moe_core.kernels.triton.quantize import programs_per_tile, quantize_rows
from moe_core.kernels.triton.sort import RowTiles
from moe_core.kernels.triton.weights import INT4_SCALE_LIMIT, GroupedWeight
from moe_core.payloads import PreparedWeights, Tensor, bias_name
from moe_core.quant import WHOLE, LayerQuant, QuantScheme

_PACKING = {"int4": "int4", "fp4": "e2m1"}
_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
#: Dtype of weights -> largest magnitude of a stored code.
_LARGEST_STORED = {"fp8": E4M3_MAX, "int8": 128.0, "int4": 8.0, "fp4": E2M1_MAX}


@attrs.frozen(eq=False)
class Projection:
    """One projection.

    Attributes:
        weight: Its weights.
        is_plain: Whether they are unquantized.
        rounds_to: dtype of the codes that rows are rounded to first, None for rows as they are.
        group: Channels that share a scale of those codes, 0 for all.
        input_scale: fp32 `[L]`, the scale of all of them if it is static, or None.
    """

    weight: GroupedWeight
    is_plain: bool
    rounds_to: torch.dtype | None
    group: int
    input_scale: Tensor | None

    @property
    def rounded_group(self) -> int:
        """Channels that share a scale which follows from them alone; 0 for rows as they are, all channels or static."""
        return self.group if self.rounds_to is not None and self.input_scale is None else 0

    def takes_planes(self) -> bool:
        """Whether its weights can be decoded in planes."""
        return self.rounds_to is None and self.weight.takes_planes()

    def new_scale(self, codes: Tensor) -> Tensor:
        """Room for the scales of such groups of `codes [R, C]`: fp32 `[R, ceil(C / group)]`."""
        return codes.new_empty((codes.shape[0], divided_up(codes.shape[1], self.group)), dtype=torch.float32)

    def rounded(
        self, rows: Tensor, tiles: RowTiles | None, pdl: str = "", awaited: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """`rows [R, C]` as the GEMM reads them, and fp32 scales `[R, groups]`, None for floats; only those of `tiles`.

        Static scales are those of experts, so that they need `tiles`; `pdl` and `awaited` are those of `quantize_rows`.
        """
        if self.rounds_to is None:
            return rows, None
        scale, group = self.input_scale, self.group or rows.shape[1]
        return quantize_rows(rows, self.rounds_to, group, static_scale=scale, tiles=tiles, pdl=pdl, awaited=awaited)

    def programs_per_tile(self, block_m: int, width: int) -> int:
        """Programs that round a tile of such rows, 0 where they are read as they are."""
        return 0 if self.rounds_to is None else programs_per_tile(block_m, width, self.group or width)


def projection(weights: PreparedWeights, name: str, scheme: QuantScheme) -> Projection:
    """The projection called `name`, `w13` or `w2`."""
    scale = weights.get(f"{name}_scale")
    # Scales of whole rows multiply the outputs.
    rows, columns = scheme.weight_block if scale is not None and isinstance(scheme.weight_block, tuple) else (1, WHOLE)
    weight = GroupedWeight(
        data=weights[name],
        packing=_PACKING.get(scheme.weight_dtype, "plain"),
        bias=weights.get(bias_name(name)),
        scale=scale,
        block=(rows, 0 if columns == WHOLE else columns),
        zero_point=weights.get(f"{name}_zero_point"),
        row_scale=weights.get(f"{name}_output_scale"),
    )
    return Projection(
        weight=weight,
        is_plain=not scheme.is_quantized,
        rounds_to=_CODES.get(scheme.activation_dtype),
        group=max(0, int(scheme.activation_group)),
        input_scale=weights.get(f"{name}_input_scale"),
    )


def check_scales(tensors: Mapping[str, Tensor], quant: LayerQuant, dtype: str) -> None:
    """Refuse canonical weights whose scales inside rows are too large for their kernels.

    Args:
        tensors: The weights, by name.
        quant: Their schemes.
        dtype: Word of the layer's dtype, in which weights are multiplied by float rows.

    Raises:
        WeightsError: A scale of int4 is `INT4_SCALE_LIMIT` or more, or a weight of an fp16 layer may exceed fp16.
    """
    for name, scheme in (("w13", quant.w13), ("w2", quant.w2)):
        may_overflow = dtype == "fp16" and scheme.activation_dtype == "same"
        if not scheme.is_quantized or scheme.scales_whole_rows or not (scheme.weight_dtype == "int4" or may_overflow):
            continue
        scale = scale_values(tensors[f"{name}_scale"])
        if scheme.weight_dtype == "int4" and bool((scale.abs() >= INT4_SCALE_LIMIT).any()):
            raise WeightsError(
                f"{name}_scale: up to {float(scale.abs().amax()):.3g}, and runner triton multiplies int4 by "
                f"scales below {INT4_SCALE_LIMIT:.3g}; check the checkpoint, or choose runner torch"
            )
        if may_overflow:
            _check_values(name, scheme, scale, tensors.get(f"{name}_zero_point"))


def _check_values(name: str, scheme: QuantScheme, scale: Tensor, zero_point: Tensor | None) -> None:
    """Raise `WeightsError` where a code times its scale may be more than fp16 holds."""
    magnitudes = _LARGEST_STORED[scheme.weight_dtype] + (0 if zero_point is None else zero_point.abs().float())
    largest = float((scale.abs() * magnitudes).nan_to_num(0.0, posinf=torch.inf).amax()) if scale.numel() else 0.0
    if largest > torch.finfo(torch.float16).max:
        raise WeightsError(
            f"{name}: values up to {largest:.3g}, and runner triton multiplies the weights of an fp16 layer in fp16, "
            "which ends at 65504; choose a bf16 layer or runner torch"
        )


def operands_of(w13: QuantScheme, w2: QuantScheme) -> str:
    """The word of `tiles.OPERANDS` for a layer."""
    if not (w13.is_quantized or w2.is_quantized):
        return "half"
    if w13.activation_dtype != "same" and w2.activation_dtype != "same":
        return "byte"
    return "byte_weight" if w13.weight_dtype in _CODES and w2.weight_dtype in _CODES else "narrow"
