"""Quantization arguments of compressed-tensors, as fields of a scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.quant.hf.fields import look_up, refuse_unknown, text, whole_number
from moe_core.quant.hf.weight import Weight
from moe_core.quant.scheme import PER_TENSOR, WHOLE

_USED = (
    "num_bits",
    "type",
    "strategy",
    "symmetric",
    "dynamic",
    "group_size",
    "block_structure",
    "actorder",
    "scale_dtype",
)
#: How ranges were found, and the type of zero points that symmetric weights do not have.
_HARMLESS = ("observer", "observer_kwargs", "zp_dtype")
_DTYPES = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "fp4"}
_EXPONENTS = ("torch.uint8", "uint8", "torch.float8_e8m0fnu", "float8_e8m0fnu")
_FLOATS = ("torch.float32", "float32", "torch.bfloat16", "bfloat16", "torch.float16", "float16")
_E4M3 = ("torch.float8_e4m3fn", "float8_e4m3fn")
#: Orders of activation that end with the channels where they were.
_CALIBRATION_ORDERS = dict.fromkeys((None, False, "weight", "static"))


def weight_fields(args: Mapping[str, Any], weight: Weight, exponents: bool) -> dict[str, Any]:
    """`weight_dtype`, `weight_block`, `weight_scale`, `global_scale` and `zero_point` of a scheme.

    Args:
        args: The group's `weights`.
        weight: Whom errors are about.
        exponents: Whether the format has exponent bytes as scales, whatever `scale_dtype` says.
    """
    dtype = _dtype(args, weight)
    look_up(args, "dynamic", dict.fromkeys((None, False)), weight)
    look_up(args, "actorder", _CALIBRATION_ORDERS, weight)
    strategy = _strategy(args, weight)
    if strategy == "block":
        block = _block_structure(args, weight)
    elif strategy in ("group", "tensor_group"):
        block = (1, _group_size(args, weight))
    else:
        block = look_up({"strategy": strategy}, "strategy", {"tensor": (WHOLE, WHOLE), "channel": (1, WHOLE)}, weight)
    fields: dict[str, Any] = {
        "weight_dtype": dtype,
        "weight_block": block,
        "weight_scale": _scale(args, weight, exponents),
    }
    if strategy == "tensor_group":
        fields["global_scale"] = True
    if not look_up(args, "symmetric", {None: True, True: True, False: False}, weight):
        fields["zero_point"] = True
    return fields


def activation_fields(args: Mapping[str, Any] | None, weight: Weight, exponents: bool) -> dict[str, Any]:
    """The `activation_*` fields of a scheme; none where activations are left alone."""
    if args is None:
        return {}
    dtype = _dtype(args, weight)
    look_up(args, "symmetric", dict.fromkeys((None, True)), weight)
    look_up(args, "actorder", dict.fromkeys((None, False)), weight)
    strategy = _strategy(args, weight)
    dynamic = look_up(args, "dynamic", {None: False, False: False, True: True, "local": "local"}, weight)
    if strategy == "tensor_group":
        # Blocks always have scales of their data; what the checkpoint brings is the scale of the whole.
        look_up(args, "dynamic", dict.fromkeys((None, False, "local")), weight)
        group, scaling = _group_size(args, weight), "static"
    elif strategy == "tensor" and dynamic is False:
        group, scaling = PER_TENSOR, "static"
    elif strategy == "group":
        group, scaling = _group_size(args, weight), "dynamic"
    else:
        group = look_up({"strategy": strategy}, "strategy", {"token": WHOLE, "tensor": PER_TENSOR}, weight)
        scaling = "dynamic"
    if scaling == "dynamic" and dynamic is not True:
        raise weight.error(f"input_activations of strategy {strategy!r} with dynamic {dynamic!r} are not understood")
    return {
        "activation_dtype": dtype,
        "activation_scaling": scaling,
        "activation_group": group,
        "activation_scale": _scale(args, weight, exponents),
    }


def _dtype(args: Mapping[str, Any], weight: Weight) -> str:
    refuse_unknown(args, weight, _USED, _HARMLESS)
    bits = 8 if args.get("num_bits") is None else whole_number(args, "num_bits", weight)
    key = ((text(args, "type", weight) or "int").lower(), bits)
    if key not in _DTYPES:
        known = ", ".join(f"{kind} of {bits} bits" for kind, bits in _DTYPES)
        raise weight.error(f"{key[0]} of {key[1]} bits is not understood; known: {known}")
    return _DTYPES[key]


def _strategy(args: Mapping[str, Any], weight: Weight) -> str:
    """The strategy, or what the package takes the group size to mean where there is none."""
    strategy = text(args, "strategy", weight)
    if strategy is not None:
        return strategy.lower()
    if args.get("group_size") is None:
        return "tensor"
    return "channel" if whole_number(args, "group_size", weight) == WHOLE else "group"


def _group_size(args: Mapping[str, Any], weight: Weight) -> int:
    """Channels of a group; a scheme would read 0 as one scale per tensor."""
    size = whole_number(args, "group_size", weight)
    if size < 1:
        raise weight.error(f"expected group_size of strategy {_strategy(args, weight)!r} to be positive, got {size}")
    return size


def _scale(args: Mapping[str, Any], weight: Weight, exponents: bool) -> str:
    """Type of the scales: what `scale_dtype` says, else what follows from the format and the strategy."""
    fp4 = _dtype(args, weight) == "fp4"
    default = "e4m3" if _strategy(args, weight) == "tensor_group" else "e8m0" if exponents or fp4 else "fp32"
    meanings: dict[Any, str] = {None: default, **dict.fromkeys(_EXPONENTS, "e8m0"), **dict.fromkeys(_E4M3, "e4m3")}
    return look_up(args, "scale_dtype", {**meanings, **dict.fromkeys(_FLOATS, "fp32")}, weight)


def _block_structure(args: Mapping[str, Any], weight: Weight) -> tuple[int, int]:
    given = args.get("block_structure")
    sizes = given.split("x") if isinstance(given, str) else given
    try:
        rows, columns = map(int, sizes or ())
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise weight.error(f"expected block_structure to be rows and columns, got {given!r}")
    return rows, columns
