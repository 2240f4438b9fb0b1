"""FP8 experts modules of transformers (`FP8Experts`): how they store weights and scales, as quantization schemes.

Weights are e4m3 `[E, N, K]`, or packed fp4 (int8 `[E, N, K / 2]`, even elements in the low nibbles). `..._scale_inv`
multiplies, in fp32 or e8m0: one per tile of `block_size`, per matrix where that is None, per 32 inputs for fp4. Static
activation scales are one fp32 number per expert.

What the module's own forward computes depends on the kernel that it finds; besides the order of sums, these read the
same numbers otherwise:

- Power-of-two weight scales here mean power-of-two activation scales, as in the checkpoints that introduced them. Its
  Triton kernel does so for blocks of 1 x 32 and keeps fp32 ones for other blocks.
- It rounds the result of the first projection and the activation to the dtype of the tokens before it quantizes again.
- For gated experts its kernels take neither one scale per matrix nor tiles that gate and up would share.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from moe_core.payloads import Tensor
from moe_core.quant import PER_TENSOR, WHOLE, LayerQuant, QuantScheme

_ACTIVATION_SCHEMES = ("dynamic", "static")
_WEIGHTS = {torch.float8_e4m3fn: "fp8", torch.int8: "fp4"}
_SCALES = {torch.float32: "fp32", torch.float8_e8m0fnu: "e8m0"}
#: Block of packed fp4 weights, whatever `block_size` says.
FP4_BLOCK = (1, 32)


@attrs.frozen
class Fp8Format:
    """What an FP8 experts module says about its numbers.

    Attributes:
        block_size: (rows, columns) of one weight scale, None for one per matrix; does not concern fp4.
        activation_scheme: `dynamic` or `static`.
    """

    block_size: tuple[int, ...] | None
    activation_scheme: str

    def scale_names(self, first_name: str) -> dict[str, str]:
        """Canonical name -> name of the parameter, for everything besides the weights."""
        names = {"w13_scale": f"{first_name}_scale_inv", "w2_scale": "down_proj_scale_inv"}
        if self.activation_scheme == "static":
            # This name does not depend on whether the experts are gated.
            names |= {
                "w13_input_scale": "gate_up_proj_activation_scale",
                "w2_input_scale": "down_proj_activation_scale",
            }
        return names


def read_format(module: torch.nn.Module) -> Fp8Format | None:
    """The format of an FP8 experts module, unchecked; None for a module of floats."""
    if "activation_scheme" not in vars(module):
        return None
    block = getattr(module, "block_size", None)
    return Fp8Format(tuple(block) if isinstance(block, list | tuple) else block, module.activation_scheme)  # type: ignore[arg-type]


def format_problems(form: Fp8Format, tensors: dict[str, Tensor], first_name: str, halves: int) -> Iterator[str]:
    """Everything about the module's numbers that is not understood.

    Args:
        form: What the module says.
        tensors: Its parameters by name.
        first_name: Name of the first projection.
        halves: 2 where that holds gate and up, else 1.
    """
    block = form.block_size
    if block is not None and (len(block) != 2 or min(block) < 1):
        yield f"block_size is {block!r}; expected (rows, columns) or None"
        return
    if form.activation_scheme not in _ACTIVATION_SCHEMES:
        yield f"activation_scheme is {form.activation_scheme!r}; expected {' or '.join(_ACTIVATION_SCHEMES)}"
    for name in (first_name, "down_proj"):
        weight, scale = tensors.get(name), tensors.get(f"{name}_scale_inv")
        if weight is not None and scale is not None:
            yield from _tensor_problems(form, name, weight, scale)
    first = tensors.get(first_name)
    if halves == 2 and block is not None and first is not None and first.dtype == torch.float8_e4m3fn:
        inner = first.shape[1] // 2
        if inner % block[0] and 2 * inner > block[0]:
            yield (
                f"{first_name}_scale_inv has tiles of {block[0]} rows, and the gate ends after {inner}: transformers' "
                "loader puts a new tile there and its kernels do not, so it is not known which rows a scale serves"
            )


def read_quant(form: Fp8Format, tensors: dict[str, Tensor], first_name: str, halves: int) -> LayerQuant:
    """The schemes of both projections of a module without problems; arguments as `format_problems`."""
    w13 = _scheme(form, tensors[first_name], tensors[f"{first_name}_scale_inv"], halves)
    return LayerQuant(w13, _scheme(form, tensors["down_proj"], tensors["down_proj_scale_inv"], halves=1))


def canonical_view(name: str, tensor: Tensor, quant: LayerQuant) -> Tensor:
    """A parameter in the form of `RawWeights`, as a view: fp4 as unsigned bytes, one scale per matrix without tiles.

    Args:
        name: Its canonical name.
        tensor: The parameter.
        quant: The schemes of the module.
    """
    if tensor.dtype == torch.int8:
        return tensor.view(torch.uint8)
    scheme = {"w13_scale": quant.w13, "w2_scale": quant.w2}.get(name)
    return tensor.flatten(1) if scheme is not None and scheme.is_per_tensor else tensor


def _tensor_problems(form: Fp8Format, name: str, weight: Tensor, scale: Tensor) -> Iterator[str]:
    if weight.dtype not in _WEIGHTS:
        yield f"parameter {name} is {weight.dtype}; FP8 experts hold float8_e4m3fn or packed fp4 (int8)"
    if scale.dtype not in _SCALES:
        yield f"parameter {name}_scale_inv is {scale.dtype}; expected float32 or float8_e8m0fnu"
    elif weight.dtype == torch.int8 and scale.dtype != torch.float8_e8m0fnu:
        yield f"parameter {name} is packed fp4, {name}_scale_inv is {scale.dtype}; expected float8_e8m0fnu"
    if weight.dtype == torch.int8 and form.activation_scheme == "static":
        yield f"parameter {name} is packed fp4 with static activation scales; only dynamic ones are understood"


def _scheme(form: Fp8Format, weight: Tensor, scale: Tensor, halves: int) -> QuantScheme:
    is_static = form.activation_scheme == "static"
    scale_dtype = _SCALES[scale.dtype]
    rows, columns = FP4_BLOCK if weight.dtype == torch.int8 else form.block_size or (WHOLE, WHOLE)
    if halves == 2 and weight.shape[1] <= rows:
        # Gate and up fit into one tile together; the module still has a scale for each.
        rows = weight.shape[1] // 2
    return QuantScheme(
        weight_dtype=_WEIGHTS[weight.dtype],
        weight_block=(rows, columns),
        weight_scale=scale_dtype,
        activation_dtype="fp8",
        activation_scaling="static" if is_static else "dynamic",
        activation_group=PER_TENSOR if is_static else columns,
        # The format of scales is one statement about both: checkpoints with power-of-two scales were made for it.
        activation_scale="fp32" if is_static else scale_dtype,
    )
