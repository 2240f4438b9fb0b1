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
from moe_core.quant import QuantScheme
from moe_core.request import LayerRequest
from moe_core.testing.formats import decode
from moe_core.testing.outcome import NotRun
from moe_core.testing.reference import ReferenceLayer
from moe_core.testing.rounding import LARGEST, activation_rounder
from moe_core.weights.expected import Expected, expected_tensors

#: Root mean square of uniformly drawn codes (fp8: of the normal draws that are rounded to it).
_CODE_RMS = {"fp8": 64.0, "int8": 73.0, "int4": 4.6, "fp4": 3.0}
#: Largest activation that a calibration is taken to have seen, before each GEMM; what is larger saturates.
_CALIBRATED = {"w13": 4.0, "w2": 12.0}
#: How much larger the gate half is than the up half.
GATE_FACTOR = 2.0


@attrs.frozen(eq=False, kw_only=True)
class StoredLayer:
    """The weights of all experts of a layer.

    Attributes:
        tensors: Canonical name -> tensor with every expert of the layer.
        reference: What they mean.
        activation: The callable of an activation of kind `module`.
        post_norm: The norm after each expert, for layers that have one.
    """

    tensors: dict[str, Tensor]
    reference: ReferenceLayer
    activation: ActivationFn | None
    post_norm: PostNormFn | None

    def raw(self, experts: tuple[int, ...], device: str) -> RawWeights:
        """Fresh copies of some experts' weights."""
        owned = list(experts)
        tensors = {name: tensor[owned].to(device) for name, tensor in self.tensors.items()}
        return RawWeights(tensors=tensors, activation=self.activation, post_norm=self.post_norm)


def draw_layer(request: LayerRequest, seed: int = 0) -> StoredLayer:
    """Random weights of a request; equal requests and seeds give the same tensors, so change nothing in them."""
    # Codes and scales know of the activation only where gate and up rows lie.
    rows = ActivationSpec(gated=request.activation.gated, row_order=request.activation.row_order)
    drawn = _draw(attrs.evolve(request, activation=rows, weight_on_input=False, post_norm=False), seed)
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
        round1=activation_rounder(request.local_quant.w13, _input_scale("w13", drawn.tensors)),
        round2=activation_rounder(request.local_quant.w2, _input_scale("w2", drawn.tensors)),
    )
    return StoredLayer(tensors=drawn.tensors, reference=reference, activation=module, post_norm=post_norm)


@attrs.frozen(eq=False)
class _Drawn:
    """Stored tensors, and the float64 values of weights and biases."""

    tensors: dict[str, Tensor]
    values: dict[str, Tensor]


@functools.lru_cache(maxsize=32)
def _draw(request: LayerRequest, seed: int) -> _Drawn:
    generator = torch.Generator().manual_seed(seed + 1000)
    expected = expected_tensors(request, request.num_experts)
    tensors, values = {}, {}
    for name, scheme in (("w13", request.local_quant.w13), ("w2", request.local_quant.w2)):
        halves = request.activation.rows_per_channel if name == "w13" else 1
        part = _draw_projection(name, scheme, expected, halves, request.activation, generator)
        tensors.update(part)
        values[name] = stored_values(name, part, scheme, request.activation)
    for name in ("b13", "b2"):
        if name in expected:
            tensors[name] = (torch.randn(expected[name].shape, generator=generator) / 4).to(expected[name].dtypes[0])
            values[name] = tensors[name].double()
    return _Drawn(tensors, values)


def _input_scale(name: str, tensors: dict[str, Tensor]) -> float | None:
    scale = tensors.get(f"{name}_input_scale")
    return None if scale is None else float(scale[0])


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
    if f"{name}_input_scale" in expected:
        # One value for all experts: backends may round a token before they know its expert.
        unit_scale = _CALIBRATED[name] / LARGEST[scheme.activation_dtype]
        unit_scale /= 448.0 if scheme.activation_scale == "e4m3" else 1.0
        tensors[f"{name}_input_scale"] = torch.full(expected[f"{name}_input_scale"].shape, unit_scale)
    return tensors


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


def _as_scale(factor: Tensor, word: str, dtype: torch.dtype) -> Tensor:
    if word == "e8m0":
        return (factor.log2().round() + 127).to(torch.uint8).view(dtype)
    return factor.to(dtype)


def stored_values(name: str, tensors: dict[str, Tensor], scheme: QuantScheme, activation: ActivationSpec) -> Tensor:
    """Float64 `[E, N, K]` of one projection's stored tensors, as `RawWeights` and `QuantScheme` define them."""
    codes = decode(tensors[name], scheme.weight_dtype)
    if not scheme.is_quantized:
        return codes
    zero = tensors.get(f"{name}_zero_point")
    if zero is not None:
        codes = codes - _spread(zero.double(), codes, scheme, activation)
    values = codes * _spread(decode(tensors[f"{name}_scale"], scheme.weight_scale), codes, scheme, activation)
    factor = tensors.get(f"{name}_global_scale")
    if factor is not None:
        values = values * _by_half(factor.double().view(codes.shape[0], -1), codes.shape[1], activation)
    return values


def _by_half(factors: Tensor, num_rows: int, activation: ActivationSpec) -> Tensor:
    """`[E, 1]` or `[E, 2]` (gate, up) -> `[E, num_rows, 1]`."""
    index = torch.arange(num_rows)
    both = factors.shape[1] == 2
    half = (index % 2 if activation.row_order == "interleaved" else index * 2 // num_rows) if both else index * 0
    return factors[:, half, None]


def _spread(scale: Tensor, codes: Tensor, scheme: QuantScheme, activation: ActivationSpec) -> Tensor:
    """One factor per scale -> one per code."""
    if not isinstance(scheme.weight_block, tuple):
        raise NotRun(f"{scheme}: no block, so its scales have no meaning")
    if scheme.is_per_tensor:
        return _by_half(scale, codes.shape[1], activation)
    if scheme.scales_whole_rows:
        return scale[..., None]
    across, along = scheme.block_of(codes.shape[1], codes.shape[2])
    rows, columns = torch.arange(codes.shape[1]) // across, torch.arange(codes.shape[2]) // along
    return scale[:, rows][:, :, columns]


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
