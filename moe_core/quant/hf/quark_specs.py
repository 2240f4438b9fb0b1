"""Quark's specifications of weights and activations, as a scheme and its storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from moe_core.quant.hf.fields import Value, look_up, refuse_unknown, whole_number
from moe_core.quant.hf.weight import Weight
from moe_core.quant.known import NVFP4, NVFP4_W4A16
from moe_core.quant.scheme import PER_TENSOR, WHOLE
from moe_core.quant.stored import StoredScheme

_USED = (
    "dtype",
    "is_dynamic",
    "dynamic",
    "qscheme",
    "ch_axis",
    "axis",
    "group_size",
    "block_size",
    "symmetric",
    "scale_type",
    "scale_format",
    "scale_calculation_mode",
    "zero_point_type",
    "is_scale_quant",
    "mx_element_dtype",
)
#: How ranges were found, how codes were rounded, and how memory was spared.
_HARMLESS = ("observer_cls", "round_method", "enable_buffer_reuse", "max_input_numel", "qat_spec")
#: Quark's word -> dtype of weights, and of activations.
_WEIGHTS = {"fp8_e4m3": "fp8", "int8": "int8", "int4": "int4", "uint4": "int4", "fp4": "fp4"}
_ACTIVATIONS = {"fp8_e4m3": "fp8", "int8": "int8", "int4": "int4", "fp4": "fp4"}
#: `scale_format` -> dtype of scales.
_SCALES = {None: "fp32", "float32": "fp32", "e8m0": "e8m0"}
#: (dtype, qscheme) -> storage of weights.
_STORAGES = {
    ("fp8_e4m3", "per_tensor"): "scaled",
    ("fp8_e4m3", "per_channel"): "scaled",
    ("fp8_e4m3", "per_group"): "scaled",
    ("fp8_e4m3", "per_block"): "scaled",
    ("int8", "per_tensor"): "scaled",
    ("int8", "per_channel"): "scaled",
    ("fp4", "per_group"): "packed_fp4",
    ("int4", "per_group"): "quark_int4",
    ("int4", "per_channel"): "quark_int4_channel",
    ("uint4", "per_group"): "quark_uint4",
    ("uint4", "per_channel"): "quark_uint4_channel",
}


@attrs.frozen
class _Spec:
    """One stage of a tensor's quantization: its fields as given, with `axis` as `ch_axis`."""

    given: Mapping[str, Any]
    weight: Weight

    @classmethod
    def of(cls, given: Any, weight: Weight) -> _Spec:
        refuse_unknown(given, weight, _USED, _HARMLESS)
        look_up(given, "zero_point_type", dict.fromkeys((None, "int32")), weight)
        look_up(given, "mx_element_dtype", {None: None}, weight)
        return cls({**given, "ch_axis": given.get("ch_axis", given.get("axis"))}, weight)

    def look_up(self, field: str, meanings: Mapping[Any, Value]) -> Value:
        return look_up(self.given, field, meanings, self.weight)

    @property
    def is_dynamic(self) -> bool:
        field = "is_dynamic" if "is_dynamic" in self.given else "dynamic"
        return self.look_up(field, {None: False, False: False, True: True})

    @property
    def is_symmetric(self) -> bool:
        return self.look_up("symmetric", {None: True, True: True, False: False})

    @property
    def is_of_scales(self) -> bool:
        """Whether what is quantized are the scales of the stage before."""
        return self.look_up("is_scale_quant", {None: False, False: False, True: True})

    @property
    def kind(self) -> tuple[Any, Any]:
        """Its dtype and qscheme, as given."""
        return self.given.get("dtype"), self.given.get("qscheme")

    def group(self) -> int:
        """Columns that share a scale."""
        self.look_up("ch_axis", dict.fromkeys((-1, 1)))
        size = whole_number(self.given, "group_size", self.weight)
        if size < 1:
            raise self.weight.error(f"expected group_size of qscheme 'per_group' to be positive, got {size}")
        return size

    def block(self) -> tuple[int, int]:
        """(rows, columns) of a weight that share a scale."""
        qscheme = self.look_up("qscheme", {s: s for s in ("per_tensor", "per_channel", "per_group", "per_block")})
        if qscheme == "per_tensor":
            return (WHOLE, WHOLE)
        if qscheme == "per_channel":
            return self.look_up("ch_axis", {0: (1, WHOLE)})
        if qscheme == "per_group":
            return (1, self.group())
        sizes = self.given.get("block_size")
        if not isinstance(sizes, (list, tuple)) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
            raise self.weight.error(f"expected block_size to be two whole numbers, got {sizes!r}")
        return (sizes[0], sizes[1])


def read_specs(weights: Any, activations: Any, weight: Weight) -> StoredScheme:
    """The scheme and the storage of a layer.

    Args:
        weights: What its configuration says of weights: a specification, or a list of two, the second for what the
            first leaves.
        activations: The same of its inputs, or None.
        weight: Whom it is about.
    """
    if isinstance(weights, (list, tuple)):
        return _read_stages(weights, activations, weight)
    spec = _Spec.of(weights, weight)
    dtype = spec.look_up("dtype", _WEIGHTS)
    fields = _fields(spec, dtype)
    if spec.kind not in _STORAGES:
        raise weight.error(f"weights of dtype {spec.kind[0]!r} with qscheme {spec.kind[1]!r} are not read")
    return StoredScheme(weight.scheme(**fields, **_activation_fields(activations, weight)), _STORAGES[spec.kind])


def _fields(spec: _Spec, dtype: str) -> dict[str, Any]:
    """`weight_dtype`, `weight_block`, `weight_scale` and `zero_point` of a scheme."""
    if spec.is_dynamic or spec.is_of_scales:
        raise spec.weight.error(f"weights with is_dynamic or is_scale_quant are not understood: {dict(spec.given)!r}")
    return {
        "weight_dtype": dtype,
        "weight_block": spec.block(),
        "weight_scale": spec.look_up("scale_format", _SCALES),
        "zero_point": not spec.is_symmetric,
    }


def _read_stages(weights: Any, activations: Any, weight: Weight) -> StoredScheme:
    """NVFP4, whose second stage is for scales, or int4 on top of fp8, of which nothing but a factor is left."""
    stages = [_Spec.of(stage, weight) for stage in weights]
    kinds = [stage.kind for stage in stages]
    if kinds == [("fp4", "per_group"), ("fp8_e4m3", "per_tensor")] and stages[1].is_of_scales:
        return _read_nvfp4(stages, activations, weight)
    if kinds == [("fp8_e4m3", "per_tensor"), ("int4", "per_channel")] and not stages[0].is_dynamic:
        fields = {**_fields(stages[1], "int4"), "global_scale": True}
        if fields["zero_point"] or stages[0].is_of_scales:
            raise weight.error("int4 on top of fp8 with zero points or scales of scales is not read")
        return StoredScheme(weight.scheme(**fields, **_activation_fields(activations, weight)), "quark_int4_fp8")
    listed = ", then ".join(f"{dtype} {qscheme}" for dtype, qscheme in kinds)
    raise weight.error(
        f"weights in stages of {listed or 'nothing'} are not read; known: fp4 in groups of 16 with fp8_e4m3 scales, "
        "and fp8_e4m3 per_tensor, then int4 per_channel"
    )


def _read_nvfp4(stages: list[_Spec], activations: Any, weight: Weight) -> StoredScheme:
    for stage in stages:
        stage.look_up("scale_format", dict.fromkeys((None, "float32")))
    if stages[0].is_dynamic or stages[1].is_dynamic or stages[0].block() != (1, 16):
        raise weight.error("fp4 with fp8_e4m3 scales is read in groups of 16, not dynamic")
    if activations is None:
        return StoredScheme(NVFP4_W4A16, "quark_nvfp4")
    if not isinstance(activations, (list, tuple)):
        raise weight.error(f"expected input_tensors beside NVFP4 weights to be in two stages, got {activations!r}")
    inputs = [_Spec.of(stage, weight) for stage in activations]
    if [stage.kind for stage in inputs] != [stage.kind for stage in stages] or not (
        inputs[1].is_of_scales and inputs[0].is_dynamic and not inputs[1].is_dynamic and inputs[0].group() == 16
    ):
        raise weight.error("input_tensors beside NVFP4 weights are read as fp4 in groups of 16 with fp8_e4m3 scales")
    return StoredScheme(NVFP4, "quark_nvfp4")


def _activation_fields(given: Any, weight: Weight) -> dict[str, Any]:
    """The `activation_*` fields of a scheme; none where activations are left alone."""
    if given is None:
        return {}
    if isinstance(given, (list, tuple)):
        raise weight.error(f"input_tensors in stages are read beside NVFP4 weights alone, got {given!r}")
    spec = _Spec.of(given, weight)
    spec.look_up("symmetric", dict.fromkeys((None, True)))
    dtype = spec.look_up("dtype", _ACTIVATIONS)
    if not spec.is_dynamic:
        group, scaling = spec.look_up("qscheme", {"per_tensor": PER_TENSOR}), "static"
    else:
        # Of a power of two nothing else tells, and e8m0 scales follow the rule of the runner.
        spec.look_up("scale_type", dict.fromkeys((None, "float", "float32", "float16", "bfloat16")))
        group, scaling = _dynamic_group(spec), "dynamic"
    return {
        "activation_dtype": dtype,
        "activation_scaling": scaling,
        "activation_group": group,
        "activation_scale": spec.look_up("scale_format", _SCALES),
    }


def _dynamic_group(spec: _Spec) -> int:
    """Columns of activations that share a scale that follows from them."""
    qscheme = spec.look_up("qscheme", {s: s for s in ("per_tensor", "per_channel", "per_group")})
    if qscheme == "per_tensor":
        return PER_TENSOR
    if qscheme == "per_group":
        return spec.group()
    # The axis of tokens behind that of sequences.
    return spec.look_up("ch_axis", {1: WHOLE})
