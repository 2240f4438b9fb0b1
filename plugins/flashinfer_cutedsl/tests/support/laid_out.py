"""Small layers, and prepared weights read by the definitions of their layouts, in float64 and without any kernel.

Nothing is rounded but what NVFP4 rounds: a result differs from the answer by faults of layouts and scalars alone.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from cutedsl_layers import manager
from moe_plugin_flashinfer.emulation.memory import swizzled_places
from moe_plugin_flashinfer.prepared import MaskedWeights, WrapperWeights

from moe_core.environment import PRESETS
from moe_core.manager import BackendManager
from moe_core.payloads import PreparedWeights, RawWeights
from moe_core.plan import MoEPlan
from moe_core.planner import make_plan
from moe_core.quant import NVFP4
from moe_core.request import LayerRequest
from moe_core.testing.compare import relative_error
from moe_core.testing.formats import decode_e2m1, decode_e4m3, round_to_e2m1, round_to_e4m3
from moe_core.testing.meaning import stored_values
from moe_core.testing.reference import ReferenceLayer, activate
from moe_core.testing.rounding import activation_rounder
from moe_core.testing.stored import draw_layer, input_unit

HIDDEN, INNER, EXPERTS = 256, 192, 3
KERNELS = ("masked", "wrapper")
Tensors = dict[str, torch.Tensor]


@attrs.frozen(eq=False)
class SmallLayer:
    """A plan of one kernel of the plugin."""

    plan: MoEPlan
    manager: BackendManager

    @property
    def request(self) -> LayerRequest:
        return self.plan.request

    def prepare(self, raw: RawWeights | Tensors, out: PreparedWeights | None = None) -> PreparedWeights:
        given = raw if isinstance(raw, RawWeights) else RawWeights(tensors=raw)
        return self.manager.process_weights(self.plan, given, out)

    def raw(self, seed: int = 0, **replaced: torch.Tensor) -> Tensors:
        """Random weights that this kernel takes."""
        tensors = any_raw(self.request, seed)
        if self.plan.weight_layout == "cutedsl_wrapper":
            tensors |= servable_by_the_wrapper(self.request, tensors)
        return tensors | replaced

    def error(self, tensors: Tensors, prepared: PreparedWeights) -> float:
        """How far a layer of prepared weights is from what the raw ones mean."""
        tokens = some_tokens(self.request)
        found = computed(read(prepared), self.request, *tokens)
        return relative_error(found, reference(self.request, tensors)(*tokens))


def small_layer(kernel: str, **fields: Any) -> SmallLayer:
    made = manager()
    sizes = {"num_experts": EXPERTS, "top_k": 2, "hidden_size": HIDDEN, "intermediate_size": INNER}
    given = {"quant": NVFP4, "a2a_backend": "none", "runner_backend": f"flashinfer_cutedsl.{kernel}"}
    plan, _ = make_plan(made, LayerRequest(**{**sizes, **given, **fields}), PRESETS["b200"])
    return SmallLayer(plan, made)


def any_raw(request: LayerRequest, seed: int = 0) -> Tensors:
    """Input scales and the global scales of gate and up differ, by no special factors."""
    drawn = draw_layer(attrs.evolve(request, a2a_backend=None, runner_backend=None), seed)
    return {name: tensor.clone() for name, tensor in drawn.tensors.items()}


def servable_by_the_wrapper(request: LayerRequest, tensors: Tensors) -> Tensors:
    """One input scale for all experts; their gates, their up halves and neither in turn have a larger global scale."""
    shared = {
        name: torch.full((request.num_experts,), input_unit(name, request))
        for name in ("w13_input_scale", "w2_input_scale")
    }
    if request.activation.gated:
        factors = torch.tensor([[2.0, 1.0], [1.0, 4.0], [1.0, 1.0]])[torch.arange(request.num_experts) % 3]
        shared["w13_global_scale"] = tensors["w13_global_scale"][:, 1:] * factors
    return shared


def some_tokens(request: LayerRequest, count: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(count, request.hidden_size, generator=generator).to(torch.bfloat16)
    ids = torch.rand(count, request.num_experts, generator=generator).topk(request.top_k, dim=1).indices
    return hidden, ids, torch.rand(count, request.top_k, generator=generator) + 0.25


def reference(request: LayerRequest, tensors: Tensors) -> ReferenceLayer:
    """What raw weights mean."""
    w13, w2 = (stored_values(name, tensors, NVFP4, request.activation) for name in ("w13", "w2"))
    rounders = [activation_rounder(NVFP4, tensors[f"{name}_input_scale"]) for name in ("w13", "w2")]
    return ReferenceLayer(w13=w13, w2=w2, activation=request.activation, round1=rounders[0], round2=rounders[1])


@attrs.frozen(eq=False, kw_only=True)
class Operands:
    """What a kernel reads, in float64: `[L, N, K]` codes times block scales, rows [gate; up], and `[L]` scalars."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_alpha: torch.Tensor
    w2_alpha: torch.Tensor
    x_scale: torch.Tensor
    hidden_scale: torch.Tensor


def read(prepared: PreparedWeights) -> Operands:
    """Prepared weights of either layout, put back in order by index arithmetic."""
    if prepared.layout == "cutedsl_masked":
        masked = MaskedWeights.of(prepared)
        scales = {name: _unswizzled(getattr(masked, f"{name}_scale"), getattr(masked, name)) for name in ("w13", "w2")}
        return _operands(masked, scales, torch.arange(masked.w13.shape[1]))
    wrapper = WrapperWeights.of(prepared)
    scales = {name: _of_mma_view(getattr(wrapper, f"{name}_scale")) for name in ("w13", "w2")}
    row = torch.arange(wrapper.w13.shape[1])
    half = len(row) // 2
    # Row of [gate; up] -> its place: in turns of 64, of which up has the even ones.
    place = torch.where(row < half, row // 64 * 128 + 64 + row % 64, (row - half) // 64 * 128 + row % 64)
    return _operands(wrapper, scales, place)


def _unswizzled(swizzled: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    places = swizzled_places(codes.shape[1], 2 * codes.shape[2])
    return swizzled.view(torch.uint8).flatten(1)[:, places]


def _of_mma_view(view: torch.Tensor) -> torch.Tensor:
    row, column = torch.arange(view.shape[2] * 128)[:, None], torch.arange(view.shape[4] * 4)
    found = view.view(torch.uint8)[row % 32, row % 128 // 32, row // 128, column % 4, column // 4]
    return found.movedim(-1, 0)


def _operands(weights: MaskedWeights | WrapperWeights, scales: Tensors, rows: torch.Tensor) -> Operands:
    count = weights.w13.shape[0]
    values = {
        name: decode_e2m1(getattr(weights, name)) * decode_e4m3(scales[name]).repeat_interleave(16, -1)
        for name in ("w13", "w2")
    }
    names = ("w13_alpha", "w2_alpha", "x_scale", "hidden_scale")
    scalars = {name: getattr(weights, name).double().expand(count) for name in names}
    return Operands(w13=values["w13"][:, rows], w2=values["w2"], **scalars)


def rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """NVFP4 codes times block scales of `[K]`, as a kernel's quantizer makes them with a scale; not scaled back."""
    blocks = values.double().view(-1, 16)
    block_scale = round_to_e4m3(scale * blocks.abs().amax(1, keepdim=True) / 6)
    codes = round_to_e2m1(blocks * scale / torch.where(block_scale == 0, 1.0, block_scale))
    return (codes * block_scale).flatten()


def computed(
    operands: Operands, request: LayerRequest, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What the kernels make of tokens, slot by slot; `[T, H]` float64."""
    output = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, slots in enumerate(ids.tolist()):
        for slot, expert in enumerate(slots):
            x = rounded(hidden[token], operands.x_scale[expert])
            sums = operands.w13_alpha[expert] * (operands.w13[expert] @ x)
            h = rounded(activate(sums[None], request.activation)[0], operands.hidden_scale[expert])
            output[token] += weights[token, slot] * operands.w2_alpha[expert] * (operands.w2[expert] @ h)
    return output
