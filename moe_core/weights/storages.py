"""The tensors of every word of `moe_core.quant.STORAGES`, as data: where each lies and what it becomes."""

from __future__ import annotations

import attrs
import torch

from moe_core.payloads import TORCH_DTYPES
from moe_core.quant import QuantScheme
from moe_core.vocabulary import one_of
from moe_core.weights.codes import AWQ_PLACES
from moe_core.weights.element_types import STORED_SCALES, STORED_WEIGHTS

#: What a stored tensor becomes.
ROLES = (
    "weight",  # the codes or floats
    "scale",  # one per block
    "zero_point",  # one per block
    "global_scale",  # one per expert and half
    "input_scale",  # one per expert
    "input_zero",  # one per expert, must be zero: no scheme has zero points of activations
    "bias",  # one per row
    "zeros",  # one per block, must be zero: nothing reads it
    "group_index",  # which group each input channel belongs to: must be its position's
    "ignored",  # says nothing that is needed
)
PACKED_AXES = ("rows", "columns")


@attrs.frozen(kw_only=True)
class StoredTensor:
    """One tensor of a projection.

    Attributes:
        role: One of `ROLES`.
        suffixes: Its names after the projection's; the first that exists is read.
        transposed: Stored as `[columns, rows]`.
        packed: Axis along which one stored element may hold several values, one of `PACKED_AXES`; "" for none.
        blocked: Packed as `[rows, columns / 32, 16 bytes]`.
        unsigned: Codes with the zero in the middle; else two's complement, or fp4.
        lowered: Every code is stored less one, whole words at a time.
        places: Where code i of a word lies, if not at i.
        divides: Stored as a divisor.
        dtypes: Allowed ones; none: those of the scheme.
    """

    role: str = attrs.field(validator=one_of(*ROLES))
    suffixes: tuple[str, ...]
    transposed: bool = False
    packed: str = attrs.field(default="", validator=one_of("", *PACKED_AXES))
    blocked: bool = False
    unsigned: bool = False
    lowered: bool = False
    places: tuple[int, ...] = ()
    divides: bool = False
    dtypes: tuple[torch.dtype, ...] = ()


_INT32 = (torch.int32,)

_WEIGHT = StoredTensor(role="weight", suffixes=("weight",))
#: Two 4-bit values to a byte where the scheme has such, else one value to an element.
_PACKED_WEIGHT = StoredTensor(role="weight", suffixes=("weight",), packed="columns")
_SCALE = StoredTensor(role="scale", suffixes=("weight_scale", "weight_scale_inv", "scale"))
_INPUT = StoredTensor(role="input_scale", suffixes=("input_scale", "activation_scale"))
_FP4 = StoredTensor(role="weight", suffixes=("weight_packed",), packed="columns", dtypes=STORED_WEIGHTS["fp4"])
_GROUPS = StoredTensor(role="group_index", suffixes=("g_idx", "weight_g_idx"), dtypes=(torch.int32, torch.int64))
_SHAPE = StoredTensor(role="ignored", suffixes=("weight_shape",))
_OFFSET = StoredTensor(role="zeros", suffixes=("weight_offset",))


def _words(packed: str, *, lowered: bool = False, places: tuple[int, ...] = ()) -> tuple[StoredTensor, ...]:
    """`qweight`, `scales` and `qzeros`, all `[columns, rows]`; `packed` is the axis of the words of weights."""
    weight = StoredTensor(
        role="weight",
        suffixes=("qweight",),
        transposed=True,
        packed=packed,
        unsigned=True,
        places=places,
        dtypes=_INT32,
    )
    zeros = attrs.evolve(weight, role="zero_point", suffixes=("qzeros",), packed="rows", lowered=lowered)
    return weight, StoredTensor(role="scale", suffixes=("scales",), transposed=True), zeros


def _quark_words(*, groups: bool, unsigned: bool, stage: str = "") -> tuple[StoredTensor, ...]:
    """Words of 4-bit values: of `groups` as in `awq`, else along the rows; `stage` ends the names of scales."""
    weight = StoredTensor(
        role="weight",
        suffixes=("weight", "qweight"),
        transposed=groups,
        packed="rows" if groups else "columns",
        unsigned=unsigned,
        places=AWQ_PLACES,
        dtypes=_INT32,
    )
    zeros = attrs.evolve(weight, role="zero_point", suffixes=(f"weight_zero_point{stage}", "qzeros"), packed="rows")
    scale = StoredTensor(role="scale", suffixes=(f"weight_scale{stage}", "scales"), transposed=groups)
    return weight, scale, zeros


#: Word of `STORAGES` -> its tensors; a bias may come with each.
TENSORS: dict[str, tuple[StoredTensor, ...]] = {
    "plain": (_WEIGHT,),
    "scaled": (
        _WEIGHT,
        _SCALE,
        StoredTensor(role="zero_point", suffixes=("weight_zero_point",), dtypes=(torch.int8,)),
        _INPUT,
        StoredTensor(role="input_zero", suffixes=("input_zero_point",)),
    ),
    "packed_fp4": (_PACKED_WEIGHT, _SCALE, _INPUT),
    "compressed_tensors_packed": (
        StoredTensor(role="weight", suffixes=("weight_packed",), packed="columns", unsigned=True, dtypes=_INT32),
        _SCALE,
        StoredTensor(role="zero_point", suffixes=("weight_zero_point",), packed="rows", unsigned=True, dtypes=_INT32),
        _GROUPS,
        _SHAPE,
    ),
    "compressed_tensors_nvfp4": (
        _FP4,
        _SCALE,
        StoredTensor(role="global_scale", suffixes=("weight_global_scale",), divides=True),
        StoredTensor(role="input_scale", suffixes=("input_global_scale",), divides=True),
    ),
    "compressed_tensors_mxfp4": (_FP4, _SCALE),
    "modelopt_nvfp4": (
        attrs.evolve(_FP4, suffixes=("weight",)),
        _SCALE,
        StoredTensor(role="global_scale", suffixes=("weight_scale_2",)),
        _INPUT,
    ),
    "gpt_oss_mxfp4": (
        StoredTensor(role="weight", suffixes=("blocks",), packed="columns", blocked=True, dtypes=(torch.uint8,)),
        StoredTensor(role="scale", suffixes=("scales",)),
    ),
    "gptq": (*_words("columns", lowered=True), _GROUPS),
    "gptq_v2": (*_words("columns"), _GROUPS),
    "awq": _words("rows", places=AWQ_PLACES),
    "quark_int4": _quark_words(groups=True, unsigned=False),
    "quark_int4_channel": _quark_words(groups=False, unsigned=False),
    "quark_int4_fp8": (
        *_quark_words(groups=False, unsigned=False, stage="_2"),
        StoredTensor(role="global_scale", suffixes=("weight_scale",)),
        _INPUT,
    ),
    "quark_nvfp4": (
        attrs.evolve(_FP4, suffixes=("weight",)),
        _SCALE,
        StoredTensor(role="global_scale", suffixes=("weight_scale_2",)),
        attrs.evolve(_INPUT, suffixes=("input_scale_2",)),
    ),
    "quark_uint4": _quark_words(groups=True, unsigned=True),
    "quark_uint4_channel": _quark_words(groups=False, unsigned=True),
    "modelslim_w8a8": (_WEIGHT, _SCALE, _OFFSET),
    "modelslim_w4a8": (
        StoredTensor(role="weight", suffixes=("weight",), packed="rows", dtypes=(torch.int8,)),
        _SCALE,
        _OFFSET,
        StoredTensor(role="ignored", suffixes=("scale_bias",)),
    ),
    "modelslim_w4a4": (attrs.evolve(_WEIGHT, dtypes=(torch.int8,)), _SCALE, _OFFSET),
}

BIAS = StoredTensor(role="bias", suffixes=("bias",))

#: Canonical tensors in memory, as one more storage: their names are `w13` and `w2` with these suffixes.
CANONICAL = (
    _PACKED_WEIGHT,
    StoredTensor(role="scale", suffixes=("scale",)),
    StoredTensor(role="zero_point", suffixes=("zero_point",), dtypes=(torch.int8,)),
    StoredTensor(role="global_scale", suffixes=("global_scale",)),
    StoredTensor(role="input_scale", suffixes=("input_scale",)),
)


def allowed_dtypes(tensor: StoredTensor, scheme: QuantScheme) -> tuple[torch.dtype, ...] | None:
    """The dtypes that `tensor` may have; None for any."""
    if tensor.role == "zero_point" and scheme.is_per_tensor:
        # One number is not packed: compressed-tensors writes it as it is.
        return (torch.int8,)
    if tensor.dtypes:
        return tensor.dtypes
    if tensor.role == "weight":
        return STORED_WEIGHTS[scheme.weight_dtype]
    if tensor.role == "scale":
        return STORED_SCALES[scheme.weight_scale]
    return tuple(TORCH_DTYPES.values()) if tensor.role in ("global_scale", "input_scale", "bias") else None


def is_needed(tensor: StoredTensor, scheme: QuantScheme) -> bool:
    """Whether the layer cannot do without it; what is not needed may be there, but see `is_known`."""
    return {
        "weight": True,
        "bias": True,
        "scale": scheme.is_quantized,
        "zero_point": scheme.zero_point is True,
        # Nothing reads them; a file without has lost more than they say.
        "zeros": True,
        "global_scale": scheme.global_scale is True,
        "input_scale": scheme.activation_scaling == "static",
    }.get(tensor.role, False)


def is_known(tensor: StoredTensor, scheme: QuantScheme) -> bool:
    """Whether it may be there at all: a global scale that nobody multiplies would give wrong values."""
    return tensor.role != "global_scale" or scheme.global_scale is True


def values_per_index(tensor: StoredTensor, scheme: QuantScheme, dtype: torch.dtype) -> int:
    """Values that one stored index of the packed axis stands for; 1 where nothing is packed."""
    if tensor.blocked:
        return 32
    return max(1, dtype.itemsize * 8 // scheme.weight_bits) if tensor.packed else 1
