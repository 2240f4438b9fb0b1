"""The result that everything that is timed is compared with: the layer in fp32, expert by expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

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
#: The same by what activations are rounded to, before both products. Per product about 2.6 % for e4m3, 0.8 % for 127
#: steps over a row of normal values, and 12 to 15 % for 7 steps or e2m1.
_ROUNDED_TOLERANCE = {"fp8": 8e-2, "int8": 3e-2, "int4": 0.5, "fp4": 0.5}


class WrongResultError(MoeCoreError):
    """A layer computes something else than its weights say, by more than rounding explains."""


class Reference:
    """The answers of one input, of tokens from its first to its last: without and with rounded activations.

    Both are right. How far they are apart depends on scales: a static one may be far too large for a row.

    Attributes:
        tolerance: Largest relative error from the nearer answer that rounding explains.
    """

    def __init__(
        self,
        request: LayerRequest,
        weights: Mapping[str, Tensor],
        inputs: tuple[Tensor, Tensor, Tensor],
        told: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compute it.

        Args:
            request: The layer, without a norm after its experts.
            weights: Its canonical tensors, on the device of the inputs.
            inputs: `hidden_states`, `topk_ids` and `topk_weights` of one call.
            told: Called with (experts that are done, experts in all) before each; what it raises ends the work.
        """
        self._shape, device = inputs[0].shape, inputs[0].device
        num_tokens = self._shape[0]
        # Kernels that miss something mostly miss the end: the last token is one of these.
        self._compared = torch.linspace(0, num_tokens - 1, min(num_tokens, _MOST_TOKENS)).round().long().to(device)
        hidden_states, topk_ids, topk_weights = (tensor[self._compared] for tensor in inputs)
        activation = activation_function(request.activation)
        self._answers = torch.zeros((2, *hidden_states.shape), dtype=torch.float64, device=device)
        active = sorted(set(topk_ids.flatten().tolist()))
        for place, expert in enumerate(active):
            if told is not None:
                told(place, len(active))
            token, slot = torch.where(topk_ids == expert)
            rows, factor = hidden_states[token].float(), topk_weights[token, slot, None].float()
            if request.weight_on_input:
                rows, factor = rows * factor, torch.ones_like(factor)
            both = _product("w13", expert, rows.expand(2, *rows.shape), request, weights)
            both = activation(both.flatten(0, 1)).view(2, len(token), -1)
            both = _product("w2", expert, both, request, weights)
            self._answers.index_add_(1, token, both.double() * factor.double())
        rounded = {request.quant.w13.activation_dtype, request.quant.w2.activation_dtype} - {"same"}
        self.tolerance = max([_TOLERANCE[request.dtype], *(_ROUNDED_TOLERANCE[word] for word in rounded)])

    def error(self, output: Tensor) -> float:
        """Norm of the difference of `output [T, H]` from the unrounded answer over its norm; infinity for NaN."""
        return self._errors(output)[0]

    def _errors(self, output: Tensor) -> tuple[float, float]:
        """The same from the unrounded and from the rounded answer."""
        difference = output[self._compared].double() - self._answers
        relative = difference.norm(dim=(1, 2)) / self._answers.norm(dim=(1, 2))
        exact, rounded = relative.nan_to_num(math.inf, posinf=math.inf).tolist()
        return exact, rounded

    def check(self, output: object) -> float:
        """As `error` of a result `[T, H]`; raises `WrongResultError` where rounding does not explain it."""
        if not isinstance(output, torch.Tensor):
            raise WrongResultError(f"wrong result: expected a tensor, got {type(output).__name__}")
        if output.shape != self._shape:
            raise WrongResultError(f"wrong result: expected shape {list(self._shape)}, got {list(output.shape)}")
        errors = self._errors(output)
        if min(errors) == math.inf:
            raise WrongResultError("wrong result: it is NaN or infinite")
        if min(errors) > self.tolerance:
            raise WrongResultError(
                f"wrong result: relative error {min(errors):.2g}, at most {self.tolerance:.2g} is due to rounding"
            )
        return errors[0]


def _product(name: str, expert: int, rows: Tensor, request: LayerRequest, weights: Mapping[str, Tensor]) -> Tensor:
    """`rows @ W.T + b` with one expert's dequantized weight; of `rows [2, R, C]` the second ones are rounded before."""
    scheme = getattr(request.local_quant, name)
    alone = {key: tensor[expert : expert + 1] for key, tensor in weights.items()}
    interleaved = name == "w13" and request.activation.row_order == "interleaved"
    linear = ExpertLinear.of(scheme, alone[name], **scale_tensors(name, scheme, alone, interleaved=interleaved))
    weight = torch.empty((linear.num_outputs, linear.num_inputs), device=rows.device)
    linear.reader(0).read(weight, 0)
    if linear.output_scale is not None:
        weight *= linear.output_scale[0, :, None]
    codes, scale = linear.rounder(rows[1], alone.get(f"{name}_input_scale"))
    product = torch.stack((rows[0], codes if scale is None else codes * scale)) @ weight.T
    bias = alone.get(bias_name(name))
    return product if bias is None else product + bias[0].float()
