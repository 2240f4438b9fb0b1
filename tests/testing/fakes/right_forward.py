"""A right layer that rounds otherwise than the float64 one, as kernels are free to."""

from __future__ import annotations

import attrs
import torch
from torch.nn import functional

from moe_core import LayerRequest
from moe_core.payloads import TORCH_DTYPES, Tensor
from moe_core.quant import PER_TENSOR, WHOLE, QuantScheme
from moe_core.testing.formats import E2M1_MAX, E4M3_MAX, round_to_e2m1, round_to_e4m3
from moe_core.testing.stored import DrawnLayer

LARGEST = {"fp8": E4M3_MAX, "fp4": E2M1_MAX, "int8": 127.0, "int4": 7.0}


@attrs.frozen
class Style:
    """What is rounded to the layer's dtype on the way, and whether scales are multiplied with as reciprocals."""

    rounds_products: bool
    rounds_activation: bool
    reciprocals: bool
    seed: int


STYLES = (
    Style(rounds_products=True, rounds_activation=True, reciprocals=False, seed=1),
    Style(rounds_products=True, rounds_activation=False, reciprocals=True, seed=2),
    Style(rounds_products=False, rounds_activation=False, reciprocals=True, seed=3),
)


def _codes(values: Tensor, dtype: str) -> Tensor:
    if dtype in ("fp8", "fp4"):
        return (round_to_e4m3 if dtype == "fp8" else round_to_e2m1)(values).float()
    return values.round().clamp(-LARGEST[dtype] - 1, LARGEST[dtype])


def _over(values: Tensor, divisor: Tensor, style: Style) -> Tensor:
    return values * (1 / divisor) if style.reciprocals else values / divisor


def rounded(rows: Tensor, scheme: QuantScheme, unit: Tensor | None, style: Style) -> Tensor:
    """Activations `[n, C]` as the scheme rounds them, all in fp32; `unit [n]` for calibrated ones."""
    if scheme.activation_dtype == "same":
        return rows
    width, size = rows.shape[1], scheme.activation_group
    group = width if size in (WHOLE, PER_TENSOR) else int(size)
    groups = functional.pad(rows, (0, -width % group)).view(len(rows), -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    scale = _over(largest, torch.tensor(LARGEST[scheme.activation_dtype]), style)
    if scheme.activation_scale == "e4m3":
        scale = round_to_e4m3(_over(scale, unit.view(-1, 1, 1), style)).float() * unit.view(-1, 1, 1)
    elif scheme.activation_scaling == "static":
        scale = unit.view(-1, 1, 1).expand_as(largest)
    elif scheme.activation_scale == "e8m0" and scheme.activation_dtype == "fp4":
        scale = 2.0 ** (largest.log2().floor() - 2)
    elif scheme.activation_scale == "e8m0":
        scale = 2.0 ** scale.log2().ceil()
    codes = _codes(_over(groups, scale, style), scheme.activation_dtype)
    return (codes * scale).nan_to_num(0.0).flatten(1)[:, :width]


def right_forward(stored: DrawnLayer, request: LayerRequest, tokens: tuple[Tensor, ...], style: Style) -> Tensor:
    """The output `[T, H]` of a layer of gated SiLU, every slot with an expert."""
    hidden, ids, weights = tokens
    dtype, quant, layer = TORCH_DTYPES[request.dtype], request.local_quant, stored.reference
    experts = ids.flatten()
    units = [None if scale is None else scale[experts] for scale in map(stored.tensors.get, _SCALES)]

    def stored_as(rows: Tensor, is_rounded: bool) -> Tensor:
        return rows.to(dtype).float() if is_rounded else rows

    def gemm(rows: Tensor, matrices: Tensor) -> Tensor:
        order = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(style.seed))
        return (matrices[experts][:, :, order].float() @ rows[:, order, None])[:, :, 0]

    rows = rounded(hidden.float().repeat_interleave(ids.shape[1], 0), quant.w13, units[0], style)
    gate, up = stored_as(gemm(rows, layer.w13), style.rounds_products).chunk(2, dim=1)
    gate = stored_as(functional.silu(gate), style.rounds_activation)
    rows = rounded(stored_as(gate * up, style.rounds_activation), quant.w2, units[1], style)
    rows = stored_as(gemm(rows, layer.w2), style.rounds_products)
    rows = stored_as(rows * weights.flatten()[:, None], style.rounds_products)
    return rows.view(*ids.shape, -1).sum(1).to(dtype)


_SCALES = ("w13_input_scale", "w2_input_scale")
