"""The quantization schemes that the Triton runners compute, as patterns; free of torch, so that specs may import it."""

from __future__ import annotations

from moe_core.quant import BF16, FP16, PER_TENSOR, WHOLE, LayerQuant, QuantScheme
from moe_core.vocabulary import ANY

#: Groups of input channels that weight-only kernels take: within a tile of inputs, or all of them.
_GROUPS = (16, 32, 64, 128, WHOLE)
#: Blocks of 128 x 128 and what a rank's share or the end of the gate may leave of them.
_ROWS, _COLUMNS = (128, 64, 32, 16), (128, 64, 32)


def _weight_only(dtype: str, group: int, **more: str) -> QuantScheme:
    return QuantScheme(weight_dtype=dtype, weight_block=(1, group), weight_scale=ANY, **more)


def _both(dtype: str, block: tuple[int, int], group: int, how: str = "dynamic", scale: str = ANY) -> QuantScheme:
    """Weights and activations in the same 8 bits."""
    return QuantScheme(
        weight_dtype=dtype,
        weight_block=block,
        weight_scale=scale,
        activation_dtype=dtype,
        activation_scaling=how,
        activation_group=group,
        activation_scale="fp32",
    )


def _block_fp8(rows: int, columns: int) -> LayerQuant:
    return LayerQuant(
        _both("fp8", (rows, 128), 128, scale="fp32"),
        _both("fp8", (128, columns), 128, scale="fp32"),
    )


#: One weight scale per output channel or per half; one activation scale per token, or one for all from the checkpoint.
WHOLE_ROWS = tuple(
    _both(dtype, block, group, how)
    for dtype in ("fp8", "int8")
    for block in ((1, WHOLE), (WHOLE, WHOLE))
    for group, how in ((WHOLE, "dynamic"), (PER_TENSOR, "static"))
)
#: A tensor-parallel cut shortens the rows of w13's blocks and the columns of w2's.
BLOCK_FP8 = tuple(_block_fp8(rows, columns) for rows in _ROWS for columns in _COLUMNS)
#: Stored in fewer bits, multiplied as floats; the cut shortens w2's groups.
WEIGHT_ONLY = tuple(
    LayerQuant(_weight_only(dtype, group, **more), _weight_only(dtype, cut, **more))
    for dtype, more in (
        ("int4", {"zero_point": ANY}),
        ("int8", {"zero_point": ANY}),
        ("fp4", {"global_scale": ANY}),
        ("fp8", {}),
    )
    for group in _GROUPS
    for cut in _GROUPS
    if cut == group or (cut < group and WHOLE not in (cut, group))
)
#: Weights in panels: floats, and 8 bits on both sides with blocks of scales as wide as panels are.
IN_PANELS = (
    LayerQuant.of(BF16),
    LayerQuant.of(FP16),
    *map(LayerQuant.of, WHOLE_ROWS),
    *(_block_fp8(rows, 128) for rows in _ROWS),
)
SUPPORTED = (LayerQuant.of(BF16), LayerQuant.of(FP16), *map(LayerQuant.of, WHOLE_ROWS), *BLOCK_FP8, *WEIGHT_ONLY)
