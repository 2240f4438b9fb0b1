"""Random weights as a checkpoint would hold them, together with the float64 layer that they mean.

Codes and scales are drawn, not computed from floats: no quantizer is needed, every code occurs, and neighbouring scales
differ, so that a scale read from the wrong place shows. The gate half is larger than the up half, so that a swap shows.
"""

from __future__ import annotations

import functools
import math

import attrs
import torch

from moe_core.activation import ActivationSpec
from moe_core.payloads import ActivationFn, PostNormFn, RawWeights, Tensor
from moe_core.quant import LayerQuant, QuantScheme
from moe_core.request import LayerRequest
from moe_core.testing.formats import E4M3_MAX
from moe_core.testing.meaning import ReadFn, stored_values
from moe_core.testing.reference import ReferenceLayer
from moe_core.testing.rounding import LARGEST, activation_rounder
from moe_core.weights.expected import Expected, expected_tensors

#: Root mean square of uniformly drawn codes (fp8: of the normal draws that are rounded to it).
_CODE_RMS = {"fp8": 64.0, "int8": 73.0, "int4": 4.6, "fp4": 3.0}
#: Largest activation that a calibration is taken to have seen, before each GEMM; what is larger saturates. No round
#: numbers: bf16 tokens would often lie in the middle of two codes, and fp32 decide which is nearer.
_CALIBRATED = {"w13": 4.1484, "w2": 12.4452}
#: How much larger the gate half is than the up half.
GATE_FACTOR = 2.0


@attrs.frozen(eq=False, kw_only=True)
class DrawnLayer:
    """Random weights of all experts of a layer, and the float64 layer that they mean.

    Attributes:
        tensors: Canonical name -> tensor with every expert of the layer.
        reference: What they mean.
        quant: Their schemes, as one rank holds them.
        activation: The callable of an activation of kind `module`.
        post_norm: The norm after each expert, for layers that have one.
    """

    tensors: dict[str, Tensor]
    reference: ReferenceLayer
    quant: LayerQuant
    activation: ActivationFn | None
    post_norm: PostNormFn | None

    def raw(self, experts: tuple[int, ...], device: str) -> RawWeights:
        """Fresh copies of some experts' weights."""
        owned = list(experts)
        tensors = {name: tensor[owned].to(device) for name, tensor in self.tensors.items()}
        return RawWeights(tensors=tensors, activation=self.activation, post_norm=self.post_norm)

    @property
    def has_input_scales(self) -> bool:
        """Whether activation scales are stored."""
        return any(_is_input_scale(name) for name in self.tensors)

    def reread(self, values: ReadFn) -> ReferenceLayer:
        """The layer that someone sees who takes its stored tensors for something else.

        Args:
            values: Another `stored_values`.
        """
        activation = self.reference.activation
        w13, w2 = (values(name, self.tensors, getattr(self.quant, name), activation) for name in ("w13", "w2"))
        return attrs.evolve(self.reference, w13=w13, w2=w2)


def draw_layer(request: LayerRequest, seed: int = 0, one_input_scale: bool = False) -> DrawnLayer:
    """Random weights of a request; equal arguments give the same tensors, so change nothing in them.

    Args:
        request: The layer.
        seed: Of the draw.
        one_input_scale: Whether all experts share the calibrated activation scale, as they must where tokens are
            rounded before it is known which expert reads them. Gate and up are then a power of two apart in their
            global scales, which can move into any other scale without a change of the codes.
    """
    # Codes and scales know of the activation only where gate and up rows lie.
    rows = ActivationSpec(gated=request.activation.gated, row_order=request.activation.row_order)
    plain = attrs.evolve(request, activation=rows, weight_on_input=False, post_norm=False)
    is_static = any(scheme.activation_scaling == "static" for scheme in (request.quant.w13, request.quant.w2))
    drawn = _draw(plain, seed, one_input_scale and is_static)
    module = _module_of(request.activation)
    post_norm = _post_norm if request.post_norm else None
    reference = ReferenceLayer(
        w13=drawn.values["w13"],
        w2=drawn.values["w2"],
        b13=drawn.values.get("b13"),
        b2=drawn.values.get("b2"),
        activation=request.activation,
        module=module,
        post_norm=post_norm,
        weight_on_input=request.weight_on_input,
        round1=activation_rounder(request.local_quant.w13, drawn.tensors.get("w13_input_scale")),
        round2=activation_rounder(request.local_quant.w2, drawn.tensors.get("w2_input_scale")),
    )
    return DrawnLayer(
        tensors=drawn.tensors,
        reference=reference,
        quant=request.local_quant,
        activation=module,
        post_norm=post_norm,
    )


def _is_input_scale(name: str) -> bool:
    return name.endswith("_input_scale")


def input_unit(name: str, request: LayerRequest) -> float:
    """The activation scale of a projection (`w13...` or `w2...`) from the largest value that its calibration saw."""
    projection = name.partition("_")[0]
    scheme = getattr(request.local_quant, projection)
    unit = _CALIBRATED[projection] / LARGEST[scheme.activation_dtype]
    return unit / (E4M3_MAX if scheme.activation_scale == "e4m3" else 1.0)


@attrs.frozen(eq=False)
class _Drawn:
    """Stored tensors, and the float64 values of weights and biases."""

    tensors: dict[str, Tensor]
    values: dict[str, Tensor]


@functools.lru_cache(maxsize=32)
def _draw(request: LayerRequest, seed: int, one_input_scale: bool) -> _Drawn:
    generator = torch.Generator().manual_seed(seed + 1000)
    expected = expected_tensors(request, request.num_experts)
    tensors, values = {}, {}
    for name, scheme in (("w13", request.local_quant.w13), ("w2", request.local_quant.w2)):
        halves = request.activation.rows_per_channel if name == "w13" else 1
        part = _draw_projection(name, scheme, expected, halves, request.activation, generator)
        if f"{name}_input_scale" in expected:
            spread = _spread_out(request.num_experts, generator)
            factors = torch.ones_like(spread) if one_input_scale else spread
            part[f"{name}_input_scale"] = input_unit(name, request) * factors
            if one_input_scale and scheme.global_scale and halves == 2:
                part[f"{name}_global_scale"] = _power_apart(part[f"{name}_global_scale"])
        tensors.update(part)
        values[name] = stored_values(name, part, scheme, request.activation)
    for name in ("b13", "b2"):
        if name in expected:
            tensors[name] = (torch.randn(expected[name].shape, generator=generator) / 4).to(expected[name].dtypes[0])
            values[name] = tensors[name].double()
    return _Drawn(tensors, values)


def _draw_projection(
    name: str,
    scheme: QuantScheme,
    expected: dict[str, Expected],
    halves: int,
    activation: ActivationSpec,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """The tensors of one projection; `halves` is 2 for gate and up."""
    shape = expected[name].shape
    columns = shape[2] * (2 if scheme.weight_bits == 4 else 1)
    # So that each product of the layer keeps the size of its input.
    unit = 1.0 / math.sqrt(columns)
    gate = _gate_factor(shape[1], halves, activation)
    if not scheme.is_quantized:
        values = torch.randn(shape, generator=generator) * unit * gate[:, None]
        return {name: values.to(expected[name].dtypes[0])}
    tensors = {name: _draw_codes(expected[name], scheme.weight_dtype, generator)}
    unit /= _CODE_RMS[scheme.weight_dtype]
    if f"{name}_global_scale" in expected:
        tensors[f"{name}_global_scale"] = _draw_global(expected[f"{name}_global_scale"].shape, unit, generator)
        unit, gate = 1.0, torch.ones_like(gate)
    scale = expected[f"{name}_scale"]
    factor = 2.0 ** torch.empty(scale.shape).uniform_(-1, 1, generator=generator)
    factor *= _per_scale(gate, scale.shape) * unit
    tensors[f"{name}_scale"] = _as_scale(factor, scheme.weight_scale, scale.dtypes[0])
    if f"{name}_zero_point" in expected:
        zero = torch.randint(-3, 4, expected[f"{name}_zero_point"].shape, generator=generator)
        tensors[f"{name}_zero_point"] = zero.to(torch.int8)
    return tensors


def _spread_out(num_experts: int, generator: torch.Generator) -> Tensor:
    """Of each expert another factor, so far apart that small scales saturate: one for all is then plainly wrong."""
    return torch.empty(num_experts).uniform_(math.log(0.15), math.log(1.2), generator=generator).exp()


def _gate_factor(num_rows: int, halves: int, activation: ActivationSpec) -> Tensor:
    """`[num_rows]`: larger for rows of the gate."""
    factor = torch.ones(num_rows)
    if halves == 2 and activation.row_order == "interleaved":
        factor[0::2] = GATE_FACTOR
    elif halves == 2:
        factor[: num_rows // 2] = GATE_FACTOR
    return factor


def _per_scale(gate: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The factor of the first row that each scale of `shape` `[E, rows, ..]` covers."""
    rows = gate[torch.arange(shape[1]) * gate.shape[0] // shape[1]]
    return rows.view(-1, *[1] * (len(shape) - 2))


def _draw_codes(expected: Expected, dtype: str, generator: torch.Generator) -> Tensor:
    if dtype == "fp8":
        values = torch.randn(expected.shape, generator=generator) * _CODE_RMS["fp8"]
        return values.to(torch.float8_e4m3fn)
    if dtype == "int8":
        return torch.randint(-127, 128, expected.shape, generator=generator).to(torch.int8)
    return torch.randint(0, 256, expected.shape, generator=generator).to(torch.uint8)


def _draw_global(shape: tuple[int, ...], unit: float, generator: torch.Generator) -> Tensor:
    """Per expert and half, far apart for gate and up: one half's scale for both is then plainly wrong."""
    scale = torch.empty(shape).uniform_(0.5, 1.5, generator=generator) * unit
    if len(shape) == 2:
        scale *= torch.tensor([GATE_FACTOR, 1.0])
    return scale


def _power_apart(scale: Tensor) -> Tensor:
    """Global scales `[E, 2]` whose gate half is the up half's times a power of two."""
    return scale[:, 1:] * torch.tensor([GATE_FACTOR, 1.0])


def _as_scale(factor: Tensor, word: str, dtype: torch.dtype) -> Tensor:
    if word == "e8m0":
        return (factor.log2().round() + 127).to(torch.uint8).view(dtype)
    return factor.to(dtype)


def without_last_channel(stored: DrawnLayer) -> DrawnLayer:
    """The layer whose last intermediate channel is padding: zero codes, as a loader fills up the last rank's share.

    With zero points a zero code is a number like others; such layers stay as they are.
    """
    if any(scheme.zero_point is True for scheme in (stored.quant.w13, stored.quant.w2)):
        return stored
    activation = stored.reference.activation
    halves = 2 if activation.gated else 1
    rows = stored.reference.w13.shape[1]
    last = [rows - 2, rows - 1] if activation.row_order == "interleaved" else [rows // halves - 1, rows - 1]
    tensors = {name: tensor.clone() for name, tensor in stored.tensors.items()}
    tensors["w13"].view(torch.uint8)[:, last] = 0
    if stored.quant.w2.weight_bits == 4:
        tensors["w2"][:, :, -1] &= 0x0F
    else:
        tensors["w2"].view(_BITS[tensors["w2"].dtype.itemsize])[:, :, -1] = 0
    b13 = stored.reference.b13
    if b13 is not None:
        tensors["b13"][:, last] = 0
        b13 = tensors["b13"].double()
    changed = attrs.evolve(stored, tensors=tensors)
    return attrs.evolve(changed, reference=attrs.evolve(changed.reread(stored_values), b13=b13))


#: Integers of as many bytes, whose zero is every format's zero.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _module_of(activation: ActivationSpec) -> ActivationFn | None:
    """A gate that no known kind computes."""
    if activation.kind != "module":
        return None
    if not activation.gated:
        return torch.tanh
    return _gated_module_interleaved if activation.row_order == "interleaved" else _gated_module


def _gated_module(rows: Tensor) -> Tensor:
    gate, up = rows.tensor_split(2, dim=-1)
    return torch.tanh(gate) * up


def _gated_module_interleaved(rows: Tensor) -> Tensor:
    return torch.tanh(rows[..., 0::2]) * rows[..., 1::2]


def _post_norm(rows: Tensor) -> Tensor:
    """A root-mean-square norm in the precision that it is given, at least fp32."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(rows.dtype)
