"""The result that everything that is timed is compared with: the layer in fp32, expert by expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moe_core.errors import MoeCoreError
from moe_core.kernels.activation import activation_function
from moe_core.kernels.expert_weights import ExpertLinear
from moe_core.kernels.scale_tensors import scale_tensors
from moe_core.payloads import Tensor, bias_name
from moe_core.request import LayerRequest

#: Most tokens that are compared: a token's result does not depend on the others.
_MOST_TOKENS = 32
#: Largest relative error by the layer's dtype: operands, activation and output are rounded, and implementations that
#: add up the experts of a token in that dtype round once more for each of them.
_TOLERANCE = {"fp32": 1e-4, "fp16": 3e-3, "bf16": 2e-2}
#: Besides, how many times the error of rounding activations as the scheme says may be met: others may round at another
#: place, and all codes that are then their neighbours differ by as much as rounding changes them.
_ROUNDINGS = 2.0


class WrongResultError(MoeCoreError):
    """A layer computes something else than its weights say, by more than rounding explains."""


class Reference:
    """The answer of one input, of tokens from its first to its last.

    Attributes:
        tolerance: Largest relative error that rounding explains. What rounding activations changes depends on scales
            (a static one may be far too large for a row) and on the activation, so that it is found by doing it.
    """

    def __init__(
        self, request: LayerRequest, weights: Mapping[str, Tensor], inputs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Compute it.

        Args:
            request: The layer, without a norm after its experts.
            weights: Its canonical tensors, on the device of the inputs.
            inputs: `hidden_states`, `topk_ids` and `topk_weights` of one call.
        """
        self._shape, device = inputs[0].shape, inputs[0].device
        num_tokens = self._shape[0]
        # Kernels that miss something mostly miss the end: the last token is one of these.
        self._compared = torch.linspace(0, num_tokens - 1, min(num_tokens, _MOST_TOKENS)).round().long().to(device)
        hidden_states, topk_ids, topk_weights = (tensor[self._compared] for tensor in inputs)
        activation = activation_function(request.activation)
        self._want = torch.zeros(hidden_states.shape, dtype=torch.float64, device=device)
        with_codes = torch.zeros_like(self._want)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            token, slot = torch.where(topk_ids == expert)
            rows, factor = hidden_states[token].float(), topk_weights[token, slot, None].float()
            if request.weight_on_input:
                rows, factor = rows * factor, torch.ones_like(factor)
            both = _products("w13", expert, (rows, rows), request, weights)
            both = _products("w2", expert, (activation(both[0]), activation(both[1])), request, weights)
            for out, result in zip((self._want, with_codes), both, strict=True):
                out.index_add_(0, token, result.double() * factor.double())
        self.tolerance = _TOLERANCE[request.dtype] + _ROUNDINGS * self._relative(with_codes)

    def error(self, output: Tensor) -> float:
        """Norm of the difference of `output [T, H]` over the norm of the answer; infinity for NaN."""
        error = self._relative(output[self._compared].double())
        return error if error == error else float("inf")

    def _relative(self, found: Tensor) -> float:
        return float((found - self._want).norm() / self._want.norm())

    def check(self, output: object) -> float:
        """The error of a result `[T, H]`; raises `WrongResultError` if rounding does not explain it."""
        if not isinstance(output, torch.Tensor):
            raise WrongResultError(f"wrong result: expected a tensor, got {type(output).__name__}")
        if output.shape != self._shape:
            raise WrongResultError(f"wrong result: expected shape {list(self._shape)}, got {list(output.shape)}")
        error = self.error(output)
        if error == float("inf"):
            raise WrongResultError("wrong result: it is NaN or infinite")
        if error > self.tolerance:
            raise WrongResultError(
                f"wrong result: relative error {error:.2g}, at most {self.tolerance:.2g} is due to rounding"
            )
        return error


def _products(
    name: str, expert: int, rows: tuple[Tensor, Tensor], request: LayerRequest, weights: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """`rows @ W.T + b` with one expert's dequantized weight: of the first rows as they are, of the others rounded."""
    scheme = getattr(request.local_quant, name)
    alone = {key: tensor[expert : expert + 1] for key, tensor in weights.items()}
    interleaved = name == "w13" and request.activation.row_order == "interleaved"
    linear = ExpertLinear.of(scheme, alone[name], **scale_tensors(name, scheme, alone, interleaved=interleaved))
    weight = torch.empty((linear.num_outputs, linear.num_inputs), device=rows[0].device)
    linear.reader(0).read(weight, 0)
    if linear.output_scale is not None:
        weight *= linear.output_scale[0, :, None]
    codes, scale = linear.rounder(rows[1], alone.get(f"{name}_input_scale"))
    bias = alone.get(bias_name(name))
    exact, rounded = rows[0] @ weight.T, (codes if scale is None else codes * scale) @ weight.T
    return (exact, rounded) if bias is None else (exact + bias[0].float(), rounded + bias[0].float())
