"""Models that `accuracy.py` compares a scheme with: a float64 oracle of it, and controls with fake-quantized weights.

The oracle is that of the acceptance tests (`tests/acceptance/reference_moe.py`): written from the definitions of the
number formats, it shares no code with the quantizer, the loader or the runners.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
# Importing this module also makes the examples' modules importable.
sys.path.append(str(ROOT / "tests" / "acceptance"))
sys.path.append(str(ROOT / "examples"))

import reference_moe as oracle  # noqa: E402 - it lies beside the acceptance cases

#: Name of a scheme -> the oracle's word for it. NVFP4 is not here: its scales depend on the ecosystem.
ORACLE_SCHEMES = {
    "fp8_block128": "fp8_block",
    "w8a8_int8": "w8a8_int8",
    "w4a8_int8": "w4a8_channel",
    "w4a4_int4": "w4a4",
    "mxfp4_w4a16": "mxfp4_w4a16",
}
#: What the largest magnitude is scaled to by an NVFP4 global scale: the largest e2m1 code times the largest e4m3 scale.
_NVFP4_MAX = 6.0 * 448.0


class OracleExperts(torch.nn.Module):
    """Experts in float64, called as transformers calls experts modules.

    Args:
        layer: Dequantized weights and what is done to activations.
    """

    def __init__(self, layer: oracle.Layer) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[T, H]` in the dtype of `hidden_states`: the one rounding of the layer."""
        return oracle.moe_layer(hidden_states, self._layer, top_k_index, top_k_weights).to(hidden_states.dtype)


def use_oracle(model: Any, scheme: str, ecosystem: str, input_amax: dict[int, tuple[float, float]]) -> None:
    """Replace the experts of an unquantized model by the float64 ones of a scheme, quantized by the oracle itself.

    Args:
        model: A transformers model with gated silu experts `gate_up_proj`, `down_proj`.
        scheme: Name of a scheme.
        ecosystem: Whose layout of it.
        input_amax: Layer -> largest magnitudes in front of both projections, over its experts: for static scales.
    """
    for index, (block, experts) in enumerate(_experts(model)):
        weights = experts.gate_up_proj.detach().double(), experts.down_proj.detach().double()
        if scheme == "nvfp4":
            layer = _nvfp4_layer(*weights, input_amax[index], divides=ecosystem == "compressed_tensors")
        else:
            layer = _layer(*weights, ORACLE_SCHEMES[scheme])
        block.experts = OracleExperts(layer)


def _layer(w13: Tensor, w2: Tensor, scheme: str) -> oracle.Layer:
    """Gate and up are quantized apart, as checkpoints store them: no tile reaches from one into the other."""
    gate, up = (oracle.quantize_layer(half, w2, scheme) for half in w13.chunk(2, dim=1))
    return oracle.Layer(torch.cat([gate.w13, up.w13], dim=1), gate.w2, gate.q1, gate.q2)


def _nvfp4_layer(w13: Tensor, w2: Tensor, input_amax: tuple[float, float], divides: bool) -> oracle.Layer:
    """NVFP4 with global scales as an ecosystem stores them: fp32 numbers that multiply, or that divide.

    It matters: block scales of bf16 weights are often exact ties between two e4m3 numbers, and the rounding of the
    global scale to fp32, one way or the other, decides them.
    """

    def global_scale(amax: Tensor) -> Tensor:
        if divides:
            return 1.0 / oracle.to_fp32(_NVFP4_MAX / amax)
        return oracle.to_fp32(amax / _NVFP4_MAX)

    quantized = [oracle.quant_nvfp4(weight, global_scale(weight.abs().amax((1, 2)))) for weight in (w13, w2)]
    first, second = (global_scale(torch.tensor(amax, dtype=torch.float64)) for amax in input_amax)
    return oracle.Layer(
        *(weight.deq for weight in quantized),
        q1=lambda x: oracle.quant_nvfp4(x, first).deq,
        q2=lambda x: oracle.quant_nvfp4(x, second).deq,
    )


def _int(bits: int, group: int) -> Callable[[Tensor], Tensor]:
    return lambda weight: oracle.quant_int(weight, bits, group).deq


def _fp8(shift: int) -> Callable[[Tensor], Tensor]:
    """Tiles of 128 x 128, each read with the scale of the tile `shift` to the left of it."""

    def quantized(weight: Tensor) -> Tensor:
        codes = oracle.quant_fp8_block(weight)
        return codes.q * oracle.expand_blocks(codes.scale.roll(shift, -1), *weight.shape[-2:], 128, 128)

    return quantized


def _nvfp4(shift: int) -> Callable[[Tensor], Tensor]:
    """Groups of 16, each read with the scale of the group `shift` to the left of it."""

    def quantized(weight: Tensor) -> Tensor:
        codes = oracle.quant_nvfp4(weight)
        scale = codes.scale.roll(shift, -1).repeat_interleave(16, -1)
        return codes.q * scale * codes.scale2.reshape(-1, 1, 1)

    return quantized


#: Label -> float64 weights `[E, N, K]` as a weight-only scheme, or a faulty reader of it, sees them.
CONTROLS: dict[str, Callable[[Tensor], Tensor]] = {
    "int8, groups of 32": _int(8, 32),
    "int4, groups of 32": _int(4, 32),
    "int3, groups of 32": _int(3, 32),
    "int2, groups of 32": _int(2, 32),
    "fp8 in tiles": _fp8(0),
    "fp8 in tiles, **scales one tile off**": _fp8(1),
    "NVFP4": _nvfp4(0),
    "NVFP4, **scales one group off**": _nvfp4(1),
}


def fake_quantize(model: Any, quantized: Callable[[Tensor], Tensor]) -> None:
    """Replace a model's expert weights by what a weight-only scheme leaves of them."""
    for _, experts in _experts(model):
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight.data = quantized(weight.data.double()).to(weight.dtype)


def _experts(model: Any) -> Iterator[tuple[Any, Any]]:
    """Each MoE block and its experts, in the order of the layers."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            yield layer.mlp, layer.mlp.experts
