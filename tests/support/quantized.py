"""Random layers of any quantization scheme, what their stored weights mean, and how their activations are rounded.

Written from `QuantScheme`'s definitions with the oracle's number formats, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from oracle import activate
from reference_moe import (
    _groups,
    _safe,
    ceil_pow2,
    decode_e2m1,
    decode_e4m3fn,
    decode_e8m0,
    expand_blocks,
    floor_log2,
    int4_values,
    pow2,
    quant_nvfp4,
    to_bf16,
    to_e2m1,
    to_e4m3fn,
    to_fp32,
    unpack_nibbles,
)

from moe_core import LayerRequest
from moe_core.activation import SWIGLU, ActivationSpec
from moe_core.payloads import Tensor
from moe_core.quant import (
    BF16,
    FP8_BLOCK128,
    FP8_CHANNEL_W8A16,
    FP8_TENSOR_W8A16,
    MXFP4_W4A16,
    NVFP4,
    NVFP4_W4A16,
    PER_TENSOR,
    SCHEMES,
    W4A4_INT4,
    W4A8_INT8,
    W4A16_INT4_G32,
    W8A8_INT8,
    WHOLE,
    LayerQuant,
    QuantScheme,
)
from moe_core.weights.expected import expected_tensors


def _weights(dtype: str, block: tuple[int, int], scale: str = "fp32", **more: Any) -> QuantScheme:
    return QuantScheme(weight_dtype=dtype, weight_block=block, weight_scale=scale, **more)


def _rounding(weight: QuantScheme, dtype: str, group: int, scale: str = "fp32", how: str = "dynamic") -> QuantScheme:
    return attrs.evolve(
        weight, activation_dtype=dtype, activation_scaling=how, activation_group=group, activation_scale=scale
    )


#: Every named quantized scheme, and schemes without a name: other tiles, groups, scales, zero points, mixtures.
QUANTS: dict[str, LayerQuant] = {
    name: LayerQuant.of(scheme)
    for name, scheme in {
        **{name: scheme for name, scheme in SCHEMES.items() if scheme.is_quantized},
        "fp8_row_weights": _weights("fp8", (1, WHOLE), "bf16"),
        "fp8_tensor_dynamic": _rounding(FP8_TENSOR_W8A16, "fp8", PER_TENSOR),
        "fp8_tile_ue8m0": _rounding(_weights("fp8", (32, 24), "e8m0"), "fp8", 24, "e8m0"),
        "fp8_row_static": _rounding(FP8_CHANNEL_W8A16, "fp8", PER_TENSOR, how="static"),
        "int8_groups": _weights("int8", (1, 32)),
        "int8_row_static": _rounding(_weights("int8", (1, WHOLE)), "int8", PER_TENSOR, how="static"),
        "int8_row_zero": _rounding(_weights("int8", (1, WHOLE), zero_point=True), "int8", WHOLE),
        "int8_tensor_zero": _weights("int8", (WHOLE, WHOLE), zero_point=True),
        "int4_groups_bf16": _weights("int4", (1, 20), "bf16"),
        "int4_groups_zero": attrs.evolve(W4A16_INT4_G32, zero_point=True),
        "int4_row_zero": _weights("int4", (1, WHOLE), zero_point=True),
        "w4a8_groups": _rounding(W4A16_INT4_G32, "int8", WHOLE),
        "w4afp8": _rounding(W4A16_INT4_G32, "fp8", PER_TENSOR, how="static"),
        "int4_row_global": _rounding(_weights("int4", (1, WHOLE), global_scale=True), "fp8", WHOLE),
        "mxfp4_fp8_static": _rounding(MXFP4_W4A16, "fp8", PER_TENSOR, how="static"),
        "fp4_row_global": _weights("fp4", (1, WHOLE), global_scale=True),
        "nvfp4_w4a8": _rounding(NVFP4_W4A16, "fp8", WHOLE),
    }.items()
} | {
    "w4a4_and_w8a8": LayerQuant(W4A4_INT4, W8A8_INT8),
    "nvfp4_and_fp8": LayerQuant(NVFP4, FP8_BLOCK128),
    "int4_and_bf16": LayerQuant(W4A8_INT8, BF16),
}

_LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "fp4": 6.0}


#: Root mean square of the codes that `_codes` draws.
_RMS = {"fp8": 64.0, "int8": 74.0, "int4": 4.6, "fp4": 2.9}


def random_quantized(request: LayerRequest, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Canonical stored tensors, and their meaning: float64 weights and biases, `round_w13` and `round_w2`."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    meaning: dict[str, Any] = {}
    for name, want in expected_tensors(request, request.num_experts).items():
        if name.startswith("b"):
            tensors[name] = (torch.randn(want.shape, generator=generator) / 4).to(want.dtypes[0])
            meaning[name] = tensors[name].double()
        elif "_" not in name:
            scheme = request.local_quant.w13 if name == "w13" else request.local_quant.w2
            tensors[name] = _codes(scheme.weight_dtype, want.shape, want.dtypes[0], generator)
        else:
            scheme = request.local_quant.w13 if name.startswith("w13") else request.local_quant.w2
            tensors[name] = _factors(name, scheme, tensors, want.shape, want.dtypes[0], generator)
    for name, scheme in (("w13", request.local_quant.w13), ("w2", request.local_quant.w2)):
        meaning[name] = _values(name, scheme, tensors, request.activation if name == "w13" else None)
        meaning[f"round_{name}"] = rounding(scheme, tensors.get(f"{name}_input_scale"))
    return tensors, meaning


def _codes(word: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if word in ("int4", "fp4"):
        return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    if word == "int8":
        return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    size = 64.0 if word == "fp8" else 1 / math.sqrt(shape[-1])
    return (torch.randn(shape, generator=generator) * size).clamp(-448, 448).to(dtype)


def _factors(
    name: str,
    scheme: QuantScheme,
    tensors: dict[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """Scales that differ along every axis and make outputs of order one."""
    spread = torch.rand(shape, generator=generator) + 0.5
    if name.endswith("_input_scale"):
        # Small enough for some values to saturate.
        return spread * 4 / (_LARGEST[scheme.activation_dtype] * (448.0 if scheme.activation_scale == "e4m3" else 1.0))
    if name.endswith("_zero_point"):
        return torch.randint(-8, 8, shape, generator=generator).to(torch.int8)
    weight = tensors[name.partition("_")[0]]
    columns = weight.shape[2] * (2 if scheme.weight_dtype in ("int4", "fp4") else 1)
    base = 1 / (_RMS[scheme.weight_dtype] * math.sqrt(columns))
    if scheme.global_scale:
        # Block scales of order one; the halves' own multipliers differ by far.
        base = base if name.endswith("_global_scale") else 1.0
        spread = spread if not name.endswith("_global_scale") or len(shape) == 1 else spread * torch.tensor([1.0, 2.5])
    scale = spread * base
    if scheme.weight_scale == "e8m0" and not name.endswith("_global_scale"):
        return (floor_log2(scale.double()) + 127).to(torch.uint8)
    return scale.to(dtype)


def _values(name: str, scheme: QuantScheme, tensors: dict[str, Tensor], activation: ActivationSpec | None) -> Tensor:
    """What the stored weight means, `[L, N, C]` in float64."""
    stored = tensors[name]
    if scheme.weight_dtype == "int4":
        values = int4_values(unpack_nibbles(stored)).double()
    elif scheme.weight_dtype == "fp4":
        values = decode_e2m1(unpack_nibbles(stored))
    elif scheme.weight_dtype == "fp8":
        values = decode_e4m3fn(stored.view(torch.uint8))
    else:
        values = stored.double()
    if f"{name}_zero_point" in tensors:
        values = values - _spread(tensors[f"{name}_zero_point"].double(), scheme, values.shape, activation)
    if f"{name}_scale" in tensors:
        scale = tensors[f"{name}_scale"]
        decoded = decode_e8m0(scale) if scale.dtype == torch.uint8 else scale.double()
        values = values * _spread(decoded, scheme, values.shape, activation)
    if f"{name}_global_scale" in tensors:
        values = values * _per_half(tensors[f"{name}_global_scale"].double(), values.shape[1], activation)
    return values


def _per_half(factors: Tensor, rows: int, activation: ActivationSpec | None) -> Tensor:
    """`[L]`, `[L, 1]` or `[L, 2]` -> `[L, rows, 1]`, by the order of gate and up rows."""
    halves = factors.reshape(factors.shape[0], -1)
    if activation is not None and activation.row_order == "interleaved":
        return halves.repeat(1, rows // halves.shape[1])[..., None]
    return halves.repeat_interleave(rows // halves.shape[1], 1)[..., None]


def _spread(factors: Tensor, scheme: QuantScheme, shape: torch.Size, activation: ActivationSpec | None) -> Tensor:
    _, rows, columns = shape
    if scheme.weight_block == (WHOLE, WHOLE):
        return _per_half(factors, rows, activation)
    if scheme.weight_block == (1, WHOLE):
        return factors[..., None]
    assert isinstance(scheme.weight_block, tuple)
    height, width = (
        size if side == WHOLE else side for side, size in zip(scheme.weight_block, (rows, columns), strict=True)
    )
    return expand_blocks(factors, rows, columns, height, width)


# ---- activations -----------------------------------------------------------------------------------------------
def rounding(scheme: QuantScheme, input_scale: Tensor | None = None) -> Callable[[Tensor, list[int] | Tensor], Tensor]:
    """The values that a GEMM of `scheme` sees for all rows of a batch and the experts of these rows, in float64."""
    if scheme.activation_dtype == "same":
        return lambda x, experts: x.double()
    if input_scale is None:
        return lambda x, experts: round_exactly(x, scheme, None)[0]
    scales = input_scale.tolist()

    def by_expert(x: Tensor, experts: list[int] | Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.float64)
        for row, expert in enumerate(experts):
            out[row] = round_exactly(x[row : row + 1], scheme, scales[expert])[0]
        return out

    return by_expert


def round_exactly(x: Tensor, scheme: QuantScheme, input_scale: float | None) -> tuple[Tensor, Tensor]:
    """Rounded float64 values, and the scale of every one of them; `input_scale` is that of all rows."""
    word, group, width = scheme.activation_dtype, int(scheme.activation_group), x.shape[1]
    x = x.double()
    if input_scale is not None and scheme.activation_scale == "e4m3":
        rounded = quant_nvfp4(x, input_scale, group)
        return rounded.deq, rounded.scale.repeat_interleave(group, -1)[:, :width] * input_scale
    if input_scale is not None:
        scale = torch.full_like(x, input_scale)
    else:
        amax = (
            x.abs().max().expand(x.shape[0], 1)
            if group == 0
            else _groups(x, width if group == WHOLE else group).abs().amax(-1)
        )
        scale = _dynamic_scale(amax, word, scheme.activation_scale)
        scale = _safe(scale).repeat_interleave(width if group in (0, WHOLE) else group, -1)[:, :width]
    return _round_codes(x / scale, word) * scale, scale


def _dynamic_scale(amax: Tensor, word: str, scale_word: str) -> Tensor:
    if word == "fp4" and scale_word == "e8m0":
        return torch.where(amax > 0, pow2(floor_log2(amax) - 2), 0.0)
    scale = to_fp32(amax / _LARGEST[word])
    if scale_word == "e8m0":
        return torch.where(amax > 0, ceil_pow2(scale), 0.0)
    return to_bf16(scale) if scale_word == "bf16" else scale


def _round_codes(values: Tensor, word: str) -> Tensor:
    if word in ("fp8", "fp4"):
        return to_e4m3fn(values) if word == "fp8" else to_e2m1(values)
    return values.round().clamp(-_LARGEST[word] - 1, _LARGEST[word])


def exact_quantized(
    tokens: tuple[torch.Tensor, ...],
    meaning: dict[str, Any],
    weight_on_input: bool = False,
    activation: ActivationSpec = SWIGLU,
) -> torch.Tensor:
    """A layer without biases in float64, on what stored weights mean and with rows rounded as the scheme says."""
    hidden, ids, weights = tokens
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for expert in range(len(meaning["w13"])):
        token, slot = torch.where(ids == expert)
        experts, factor = [expert] * len(token), weights[token, slot, None].double()
        rows = meaning["round_w13"](hidden[token].double() * (factor if weight_on_input else 1.0), experts)
        inside = activate(rows @ meaning["w13"][expert].T, activation).bfloat16()
        result = meaning["round_w2"](inside, experts) @ meaning["w2"][expert].T
        out.index_add_(0, token, result * (1.0 if weight_on_input else factor))
    return out
