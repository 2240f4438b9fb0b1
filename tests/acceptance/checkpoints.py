"""A case's checkpoint (see `case_lib`) as a scheme and as canonical tensors, through the public API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from case_lib import NotOffered

from moe_core.quant import MXFP4_W4A16, NVFP4, NVFP4_W4A16, WHOLE, LayerQuant, QuantScheme
from moe_core.weights.bands import StoredLayout
from moe_core.weights.canonical import canonical_rows, canonical_weights
from moe_core.weights.codes import pack, sign_bit, unpack

Tensors = dict[str, torch.Tensor]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

#: Schemes as the oracle and its checkpoints call them -> their names here, where those differ.
_NAMES_HERE = {
    "none": "bf16",
    "plain": "bf16",
    "fp8_block": "fp8_block128",
    "fp8_block_ue8m0": "fp8_block128_ue8m0",
    "fp8_row": "fp8_channel",
    "int8": "w8a8_int8",
    "int4": "w4a8_int8",
    "w4a8_channel": "w4a8_int8",
    "w4a8_group": "w4a8_int8_g128",
    "w4a4": "w4a4_int4",
    "nvfp4_modelopt": "nvfp4",
    "nvfp4_ct": "nvfp4",
}


def look_up(kind: str, word: str, known: Mapping[str, Any]) -> Any:
    """What `word` means, or an error that says which words are known."""
    if word not in known:
        raise ValueError(f"unknown {kind} {word!r}; known: {', '.join(known)}")
    return known[word]


def named_scheme(name: str) -> QuantScheme:
    """A scheme by its name here or in the oracle."""
    return QuantScheme.from_name(_NAMES_HERE.get(name, name))


def values_per_element(ckpt: dict[str, Any]) -> int:
    """How many weights an element of the stored tensors holds."""
    return 1 if ckpt["fmt"] in ("plain", "int8", "fp8_block", "fp8_tensor") else 2


def has_bias(ckpt: dict[str, Any]) -> bool:
    """Whether a projection has a bias; the other one's is then zero."""
    return any(ckpt.get(name) is not None for name in ("b13", "b2"))


def without_halves(ckpt: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint of an activation without gate: one matrix, whose halves the cases give equal scales."""
    scales = {name: ckpt[name] for name in ("w13_scale", "w13_scale_2", "w13_global") if ckpt.get(name) is not None}
    of_halves = {name: scale for name, scale in scales.items() if scale.dim() == 2 and scale.shape[1] == 2}
    one = {name: scale[:, 0] for name, scale in of_halves.items() if torch.equal(scale[:, 0], scale[:, 1])}
    return {**ckpt, **one, "layout": "gate_up", "halves": False}


def layer_quant(ckpt: dict[str, Any], dtype: str) -> LayerQuant:
    """The schemes of both projections."""
    of_both = scheme(ckpt, dtype)
    if not _tiles_alternating_rows(ckpt):
        return LayerQuant.of(of_both)
    rows, columns = _block(ckpt)
    return LayerQuant(attrs.evolve(of_both, weight_block=(rows // 2, columns)), of_both)


def _block(ckpt: dict[str, Any]) -> tuple[int, int]:
    """Output and input channels of a tile of scales, of which checkpoints tell rows and columns as stored."""
    rows, columns = ckpt["block"]
    return (columns, rows) if ckpt["orientation"] == "in_out" else (rows, columns)


def _tiles_alternating_rows(ckpt: dict[str, Any]) -> bool:
    """Whether a tile of scales covers gate and up rows in turn, so that each half has tiles of half the rows."""
    return ckpt["fmt"] == "fp8_block" and ckpt["layout"] == "interleaved" and _block(ckpt)[0] % 2 == 0


def scheme(ckpt: dict[str, Any], dtype: str) -> QuantScheme:
    """What the weights are, and what is done to activations; of `w2` where projections differ."""
    kind = ckpt["fmt"]
    if kind == "plain":
        return QuantScheme.from_name(dtype)
    if kind in ("int8", "int4"):
        return _integers(kind, ckpt["group"] or WHOLE, f"int{ckpt.get('act_bits', 8)}")
    if kind == "fp8_block":
        scale = "e8m0" if ckpt.get("ue8m0") else "fp32"
        return _quantized("fp8", _block(ckpt), scale, "fp8", ckpt["block"][1], scale)
    if kind == "fp8_tensor":
        return _quantized("fp8", (WHOLE, WHOLE), "fp32", "fp8", WHOLE, "fp32")
    if kind == "mxfp4":
        return MXFP4_W4A16
    if kind in ("nvfp4_modelopt", "nvfp4_ct"):
        return NVFP4_W4A16 if ckpt.get("weight_only") else NVFP4
    raise NotOffered


def _integers(weight: str, group: int, activation: str) -> QuantScheme:
    return _quantized(weight, (1, group), "fp32", activation, WHOLE, "fp32")


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
    if _tiles_alternating_rows(ckpt):
        return StoredLayout(rows="gate_up", tiling="apart")
    return StoredLayout(
        rows=ckpt["layout"] if ckpt["fmt"] == "fp8_block" else "gate_up",
        tiling="apart" if ckpt.get("halves") else "through",
    )


def canonical_tensors(ckpt: dict[str, Any], dtype: torch.dtype, gated: bool) -> Tensors:
    """Tensors of all places for experts by canonical names: rows as `stored_layout` says, scales in their own tiles."""
    stored = {
        name: tensor.float() if tensor.dtype == torch.float64 and _is_cast(name, ckpt["fmt"]) else tensor
        for name, tensor in ckpt.items()
        if isinstance(tensor, torch.Tensor) and name not in ("b13", "b2", "p2l")
    }
    tensors = canonical_weights(
        _READERS[ckpt["fmt"]](ckpt, stored, dtype),
        layout="gate_up" if ckpt["fmt"] == "fp8_block" else ckpt["layout"],
        orientation=ckpt["orientation"],
        gated=gated,
    )
    if gated and _tiles_alternating_rows(ckpt) and "w13" in tensors:
        tensors["w13"] = canonical_rows(tensors["w13"], "interleaved")
        if "w13_scale" in tensors:
            # Each tile is one of gate rows and one of up rows.
            tensors["w13_scale"] = tensors["w13_scale"].repeat(1, 2, 1)
    if has_bias(ckpt):
        tensors |= _biases(ckpt, tensors, dtype, gated)
    places = ckpt.get("p2l")
    return tensors if places is None else {name: tensor[places] for name, tensor in tensors.items()}


def _is_cast(name: str, kind: str) -> bool:
    """Whether fp64 becomes fp32 at once; divisors do as multipliers."""
    return kind != "plain" and not (kind == "nvfp4_ct" and name.endswith("_global"))


def _biases(ckpt: dict[str, Any], tensors: Tensors, dtype: torch.dtype, gated: bool) -> Tensors:
    """Both, in the order of the rows of `tensors`; the oracle turns b13 of alternating rows alone."""
    shapes = {f"b{name[1:]}": tensors[name].shape[:2] for name in ("w13", "w2") if name in tensors}
    given = {name: ckpt[name] for name in ("b13", "b2") if ckpt.get(name) is not None}
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
    biases = {name: bias.to(dtype) for name, bias in (zeros | given).items()}
    rows = stored_layout(ckpt).rows
    if gated and ckpt["layout"] == "interleaved" and rows == "gate_up":
        biases["b13"] = canonical_rows(biases["b13"], "interleaved")
    if gated and rows == "up_gate":
        biases["b13"] = canonical_rows(biases["b13"], "up_gate")
    return biases


def _plain(ckpt: dict[str, Any], stored: Tensors, dtype: torch.dtype) -> Tensors:
    # Bytes are no numbers.
    return {name: tensor.to(dtype) if tensor.dtype in _FLOATS else tensor for name, tensor in stored.items()}


def _integers_in(ckpt: dict[str, Any], stored: Tensors, dtype: torch.dtype) -> Tensors:
    # One scale per output channel comes as [E, rows, 1].
    per_row = ckpt["group"] is None
    named = {n: t.squeeze(-1) if per_row and n.endswith("_scale") else t for n, t in stored.items()}
    if ckpt["fmt"] == "int4":
        flip = look_up("sign", ckpt["sign"], {"twos": 0, "offset8": sign_bit(4)})
        named |= _nibbles(ckpt, named, flip)
    return named


def _mxfp4(ckpt: dict[str, Any], stored: Tensors, dtype: torch.dtype) -> Tensors:
    return stored | _nibbles(ckpt, stored, 0)


def _nibbles(ckpt: dict[str, Any], stored: Tensors, flip: int) -> Tensors:
    """The weights with the first code in the low nibble, integers as two's complement."""
    packed = {name: stored[name] for name in ("w13", "w2") if name in stored and stored[name].dtype == torch.uint8}
    codes = look_up("nibbles", ckpt["nibbles"], _CODES)
    if ckpt["nibbles"] == "low_first" and not flip:
        return packed
    return {name: _repacked(weight, codes, flip) for name, weight in packed.items()}


def _repacked(weight: torch.Tensor, codes: Callable[[torch.Tensor], torch.Tensor], flip: int) -> torch.Tensor:
    result = torch.empty_like(weight)
    for expert in range(len(weight)):
        # One by one: the codes of all experts would be twice the checkpoint.
        result[expert] = pack(codes(weight[expert]) ^ flip)
    return result


#: Codes in their order from bytes of two, by the oracle's word for how these lie.
_CODES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "low_first": lambda packed: unpack(packed, -1, 4, ()),
    "high_first": lambda packed: unpack(packed, -1, 4, (1, 0)),
    "split": lambda packed: torch.cat([packed & 15, packed >> 4], -1),
}


def _fp8(ckpt: dict[str, Any], stored: Tensors, dtype: torch.dtype) -> Tensors:
    named = {name.removesuffix("_inv"): tensor for name, tensor in stored.items()}
    return {n: t if n.endswith("_scale") else _as_e4m3(t) for n, t in named.items()}


def _as_e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes


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
        value = _inverse(tensor) if is_divisor and tensor.is_floating_point() else tensor
        is_block_scale = canonical in ("w13_scale", "w2_scale")
        named[canonical] = _as_e4m3(value) if is_block_scale else value
    if ckpt.get("weight_only"):
        named = {name: tensor for name, tensor in named.items() if not name.endswith("_input_scale")}
    return named


def _inverse(divisor: torch.Tensor) -> torch.Tensor:
    """fp32 on the far side of what is no number of fp32: the nearest one may make ties that the oracle does not see."""
    exact = 1.0 / divisor.double()
    nearest = exact.float()
    beyond = torch.nextafter(nearest, torch.where(exact > nearest, torch.inf, 0.0).float())
    # A divisor in fp64 may be the inverse of a number of fp32, but for its own rounding.
    is_number = (nearest == exact) | ((exact - nearest).abs() <= 2.0**-50 * exact.abs())
    return torch.where(is_number, nearest, beyond)


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
