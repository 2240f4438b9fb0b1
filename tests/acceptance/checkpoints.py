"""A case's checkpoint (see `case_lib`) as a scheme and as canonical tensors, through the public API."""

from __future__ import annotations

from typing import Any

import torch
from case_lib import NotOffered

from moe_core.quant import MXFP4_W4A16, NVFP4, NVFP4_W4A16, WHOLE, QuantScheme
from moe_core.weights.bands import StoredLayout
from moe_core.weights.canonical import canonical_weights
from moe_core.weights.codes import pack, sign_bit, unpack

Tensors = dict[str, torch.Tensor]


def scheme(ckpt: dict[str, Any], dtype: str) -> QuantScheme:
    """What the weights are, and what is done to activations."""
    kind = ckpt["fmt"]
    if kind == "plain":
        return QuantScheme.from_name(dtype)
    if kind in ("int8", "int4"):
        return _integers(kind, ckpt["group"] or WHOLE, f"int{ckpt.get('act_bits', 8)}")
    if kind == "fp8_block":
        return _fp8_tiles(*ckpt["block"], "e8m0" if ckpt.get("ue8m0") else "fp32")
    if kind == "fp8_tensor":
        return _quantized("fp8", (WHOLE, WHOLE), "fp32", "fp8", WHOLE, "fp32")
    if kind == "mxfp4":
        return MXFP4_W4A16
    if kind in ("nvfp4_modelopt", "nvfp4_ct"):
        return NVFP4_W4A16 if ckpt.get("weight_only") else NVFP4
    raise NotOffered


def _integers(weight: str, group: int, activation: str) -> QuantScheme:
    return _quantized(weight, (1, group), "fp32", activation, WHOLE, "fp32")


def _fp8_tiles(rows: int, columns: int, scale: str) -> QuantScheme:
    return _quantized("fp8", (rows, columns), scale, "fp8", columns, scale)


def _quantized(
    weight: str, block: tuple[int, int], scale: str, activation: str, group: int, activation_scale: str
) -> QuantScheme:
    return QuantScheme(
        weight_dtype=weight,
        weight_block=block,
        weight_scale=scale,
        activation_dtype=activation,
        activation_scaling="dynamic",
        activation_group=group,
        activation_scale=activation_scale,
    )


def stored_layout(ckpt: dict[str, Any]) -> StoredLayout:
    """How `canonical_tensors` come: rows that share tiles of scales stay in their order, which cutting undoes."""
    is_tiled = ckpt["fmt"] == "fp8_block"
    return StoredLayout(
        rows=ckpt["layout"] if is_tiled else "gate_up", tiling="apart" if ckpt.get("halves") else "through"
    )


def canonical_tensors(ckpt: dict[str, Any], dtype: torch.dtype, gated: bool) -> Tensors:
    """Tensors of all stored experts by canonical names: rows as `stored_layout` says, scales in their own tiles."""
    stored = {name: tensor for name, tensor in ckpt.items() if isinstance(tensor, torch.Tensor)}
    tensors = canonical_weights(
        _READERS[ckpt["fmt"]](ckpt, stored, dtype),
        layout="gate_up" if ckpt["fmt"] == "fp8_block" else ckpt["layout"],
        orientation=ckpt["orientation"],
        gated=gated,
    )
    return tensors


def _plain(ckpt: dict[str, Any], stored: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.to(dtype) for name, tensor in stored.items()}


def _integers_in(ckpt: dict[str, Any], stored: Tensors, dtype: torch.dtype) -> Tensors:
    # One scale per output channel comes as [E, rows, 1].
    per_row = ckpt["group"] is None
    named = {n: t.squeeze(-1) if per_row and n.endswith("_scale") else t for n, t in stored.items()}
    if ckpt["fmt"] == "int4":
        flip = sign_bit(4) if ckpt["sign"] == "offset8" else 0
        named |= {name: _nibbles(ckpt, named[name], flip) for name in ("w13", "w2")}
    return named


def _mxfp4(ckpt: dict[str, Any], stored: Tensors, dtype: torch.dtype) -> Tensors:
    return stored | {name: _nibbles(ckpt, stored[name], 0) for name in ("w13", "w2")}


def _nibbles(ckpt: dict[str, Any], packed: torch.Tensor, flip: int) -> torch.Tensor:
    """The first code in the low nibble, integers as two's complement."""
    places = (1, 0) if ckpt["nibbles"] == "high_first" else ()
    return pack(unpack(packed, -1, 4, places) ^ flip)


def _fp8(ckpt: dict[str, Any], stored: Tensors, dtype: torch.dtype) -> Tensors:
    named = {name.removesuffix("_inv"): tensor for name, tensor in stored.items()}
    return {n: t if n.endswith("_scale") else t.view(torch.float8_e4m3fn) for n, t in named.items()}


#: Names of the NVFP4 scales as checkpoints have them -> canonical name.
_NVFP4_NAMES = {
    "w13_scale_2": "w13_global_scale",
    "w2_scale_2": "w2_global_scale",
    "w13_global": "w13_global_scale",
    "w2_global": "w2_global_scale",
    "in13_global": "w13_input_scale",
    "in2_global": "w2_input_scale",
}


def _nvfp4(ckpt: dict[str, Any], stored: Tensors, dtype: torch.dtype) -> Tensors:
    """Block scales as e4m3, divisors of compressed-tensors as multipliers."""
    named = {}
    for name, tensor in stored.items():
        canonical = _NVFP4_NAMES.get(name, name)
        is_divisor = ckpt["fmt"] == "nvfp4_ct" and name.endswith("_global")
        value = 1.0 / tensor.float() if is_divisor else tensor
        is_block_scale = canonical in ("w13_scale", "w2_scale")
        named[canonical] = value.view(torch.float8_e4m3fn) if is_block_scale else value
    if ckpt.get("weight_only"):
        named = {name: tensor for name, tensor in named.items() if not name.endswith("_input_scale")}
    return named


_READERS = {
    "plain": _plain,
    "int8": _integers_in,
    "int4": _integers_in,
    "mxfp4": _mxfp4,
    "fp8_block": _fp8,
    "fp8_tensor": _fp8,
    "nvfp4_modelopt": _nvfp4,
    "nvfp4_ct": _nvfp4,
}
