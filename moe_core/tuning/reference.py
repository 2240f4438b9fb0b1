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
#: The same by what activations are rounded to, before both products; the reference does not round them. Per product
#: about 2.6 % for e4m3, 0.8 % for 127 steps over a row of normal values, and 12 to 15 % for 7 steps or e2m1.
_ROUNDED_TOLERANCE = {"fp8": 8e-2, "int8": 3e-2, "int4": 0.5, "fp4": 0.5}


class WrongResultError(MoeCoreError):
    """A layer computes something else than its weights say, by more than rounding explains."""


def tolerance(request: LayerRequest) -> float:
    """Largest relative error that rounding explains."""
    rounded = {request.quant.w13.activation_dtype, request.quant.w2.activation_dtype}
    return max([_TOLERANCE[request.dtype], *(_ROUNDED_TOLERANCE[word] for word in rounded if word != "same")])


class Reference:
    """The answer of one input, of its first tokens."""

    def __init__(
        self, request: LayerRequest, weights: Mapping[str, Tensor], inputs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Compute it.

        Args:
            request: The layer, without a norm after its experts.
            weights: Its canonical tensors, on the device of the inputs.
            inputs: `hidden_states`, `topk_ids` and `topk_weights` of one call.
        """
        self._shape, self._allowed = inputs[0].shape, tolerance(request)
        hidden_states, topk_ids, topk_weights = (tensor[:_MOST_TOKENS] for tensor in inputs)
        activation = activation_function(request.activation)
        self._want = torch.zeros(hidden_states.shape, dtype=torch.float64, device=hidden_states.device)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            token, slot = torch.where(topk_ids == expert)
            rows, factor = hidden_states[token].float(), topk_weights[token, slot, None].float()
            if request.weight_on_input:
                rows, factor = rows * factor, torch.ones_like(factor)
            rows = _product("w13", expert, rows, request, weights)
            rows = _product("w2", expert, activation(rows), request, weights)
            self._want.index_add_(0, token, rows.double() * factor.double())

    def error(self, output: Tensor) -> float:
        """Norm of the difference of `output [T, H]` over the norm of the answer; infinity for NaN."""
        found = output[:_MOST_TOKENS].double()
        error = float((found - self._want).norm() / self._want.norm())
        return error if error == error else float("inf")

    def check(self, output: object) -> float:
        """The error of a result `[T, H]`; raises `WrongResultError` if rounding does not explain it."""
        if not isinstance(output, torch.Tensor):
            raise WrongResultError(f"wrong result: expected a tensor, got {type(output).__name__}")
        if output.shape != self._shape:
            raise WrongResultError(f"wrong result: expected shape {list(self._shape)}, got {list(output.shape)}")
        error = self.error(output)
        if error == float("inf"):
            raise WrongResultError("wrong result: it is NaN or infinite")
        if error > self._allowed:
            raise WrongResultError(
                f"wrong result: relative error {error:.2g}, at most {self._allowed:.2g} is due to rounding"
            )
        return error


def _product(name: str, expert: int, rows: Tensor, request: LayerRequest, weights: Mapping[str, Tensor]) -> Tensor:
    """`rows @ W.T + b` with one expert's dequantized weight."""
    scheme = getattr(request.local_quant, name)
    alone = {key: tensor[expert : expert + 1] for key, tensor in weights.items()}
    interleaved = name == "w13" and request.activation.row_order == "interleaved"
    linear = ExpertLinear.of(scheme, alone[name], **scale_tensors(name, scheme, alone, interleaved=interleaved))
    weight = torch.empty((linear.num_outputs, linear.num_inputs), device=rows.device)
    linear.reader(0).read(weight, 0)
    if linear.output_scale is not None:
        weight *= linear.output_scale[0, :, None]
    product = rows @ weight.T
    bias = alone.get(bias_name(name))
    return product if bias is None else product + bias[0].float()
