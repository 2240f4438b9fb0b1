"""One comparison with the module's own forward: flags are a promise, and this is where a broken one shows."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial

import attrs
import torch

from moe_core.errors import PluginError, UnsupportedModelError
from moe_core.integrations.transformers.fp8 import FP4_BLOCK, Fp8Format
from moe_core.integrations.transformers.layout import ExpertsLayout, borrow_weights
from moe_core.integrations.transformers.traits import local_parameters
from moe_core.kernels.activation import activation_function
from moe_core.kernels.dequantize import WeightReader, num_columns
from moe_core.kernels.expert_weights import ExpertLinear, Experts
from moe_core.kernels.experts import experts_standard
from moe_core.kernels.number_formats import round_e4m3
from moe_core.payloads import TORCH_DTYPES, Tensor, bias_name
from moe_core.quant import LayerQuant, QuantScheme

# Far above rounding (bf16 experts differ from each other by 1e-2 of the largest value, fp32 ones by 1e-5, and by 1e-3
# where matrix units round their inputs), far below what another formula does to these probe tokens.
_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 6e-2, torch.float16: 6e-2}
# Activations rounded to e4m3 twice (up to 6e-2 each) beside unrounded ones.
_FP8_TOLERANCE = 0.2


@torch.no_grad()
def check_against_eager(
    module: torch.nn.Module, experts: Callable[[Tensor, Tensor, Tensor], Tensor], layout: ExpertsLayout, top_k: int
) -> None:
    """Compare `experts` with the class's own forward on two tokens with `top_k` experts of unequal router weights.

    The forward of FP8 experts needs a kernel for each matrix; here it multiplies dequantized weights instead. Nothing
    is concluded from weights that are not filled yet, that is, if the module's own result is not finite.

    Raises:
        UnsupportedModelError: The results differ by more than rounding.
        PluginError: `experts` wrote to their inputs.
    """
    parameters = list(module.parameters(recurse=False))
    if any(hasattr(parameter, "to_local") for parameter in parameters):
        # Split over ranks: the module's own forward runs only where transformers has set the parts in place.
        return
    hidden_states, topk_ids, topk_weights = _probe_tokens(layout, top_k, parameters[0].device)
    with torch.autocast(hidden_states.device.type, enabled=False):
        owner = module
        if layout.flags.fp8 is not None:
            owner = _runs_everywhere(module, layout.flags.fp8)
        expected = inspect.unwrap(type(module).forward)(owner, hidden_states, topk_ids, topk_weights).float()
        before = hidden_states.clone(), topk_weights.clone()
        found = experts(hidden_states, topk_ids, topk_weights).float()
    if not (torch.equal(hidden_states, before[0]) and torch.equal(topk_weights, before[1])):
        raise PluginError(f"{experts} wrote to its tokens or their weights, which the model may read again")
    largest, difference = float(expected.abs().max()), float((found - expected).abs().max())
    tolerance = _TOLERANCE[hidden_states.dtype] if layout.flags.fp8 is None else _FP8_TOLERANCE
    if largest < float("inf") and not difference <= tolerance * largest:
        raise UnsupportedModelError(
            f"the forward of {type(module).__qualname__} of {type(module).__module__} computes something else than its "
            f"flags say: on two probe tokens the results differ by {difference:.2g}, the largest is {largest:.2g}; "
            "select another experts_implementation for this model"
        )


@torch.no_grad()
def check_formula(module: torch.nn.Module, layout: ExpertsLayout) -> None:
    """As `check_against_eager` for a module without data: its class, with two experts of random floats.

    Args:
        module: The module; left as it is.
        layout: What it is understood to compute, whatever its weights are.

    Raises:
        UnsupportedModelError: The results differ by more than rounding.
    """
    generator, dtype = torch.Generator().manual_seed(1), TORCH_DTYPES[layout.dtype]
    twin = copy.copy(module)
    twin.num_experts = 2  # type: ignore[assignment]
    twin._parameters = {}
    for name, parameter in local_parameters(module).items():
        values = torch.randn((2, *parameter.shape[1:]), generator=generator, dtype=dtype) / layout.hidden_size**0.5
        twin._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
    floats = LayerQuant.of(QuantScheme.from_name(layout.dtype))
    small = attrs.evolve(layout, num_experts=2, quant=floats, device_type="cpu")
    raw = borrow_weights(twin, small)
    w13, w2 = (
        ExpertLinear.of(floats.w13, raw.tensors[name], bias=raw.tensors.get(bias_name(name))) for name in ("w13", "w2")
    )
    experts = Experts(w13=w13, w2=w2, activation=raw.activation or activation_function(layout.activation))
    check_against_eager(twin, partial(_standard, experts), small, top_k=2)


def _standard(experts: Experts, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    return experts_standard(hidden_states, topk_ids, topk_weights, experts)


def _runs_everywhere(module: torch.nn.Module, form: Fp8Format) -> torch.nn.Module:
    """The same FP8 experts, whose `linear` needs no kernel."""
    twin = copy.copy(module)
    twin.linear = partial(_dequantized_linear, form)  # type: ignore[assignment]
    return twin


def _dequantized_linear(
    form: Fp8Format, rows: Tensor, weight: Tensor, weight_scale_inv: Tensor, activation_scale: Tensor | None = None
) -> Tensor:
    """`rows [R, K]` times one expert's matrix `[N, K]`; of its activation scales only static ones are applied."""
    values = rows.float()
    if activation_scale is not None:
        values = round_e4m3(values / activation_scale).float() * activation_scale
    return (values @ _values(form, weight, weight_scale_inv).T).to(rows.dtype)


def _values(form: Fp8Format, weight: Tensor, scale: Tensor) -> Tensor:
    """One expert's matrix `[N, K]` in fp32."""
    is_fp4 = weight.dtype == torch.int8
    codes, word = (weight.view(torch.uint8), "fp4") if is_fp4 else (weight, "fp8")
    shape = (weight.shape[0], num_columns(codes, word))
    block = FP4_BLOCK if is_fp4 else form.block_size or shape
    # Where one tile would hold gate and up, each has a scale.
    rows, columns = (
        tile if count == -(-size // tile) else size // count
        for size, tile, count in zip(shape, block, scale.shape, strict=True)
    )
    values = weight.new_empty(shape, dtype=torch.float32)
    WeightReader.of(codes, word, (rows, columns), scale, None).read(values, 0)
    return values


def _probe_tokens(layout: ExpertsLayout, top_k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    # Where a plan takes slots one by one (top_k 1), two of them show whether the weights are the router's.
    slots = top_k if top_k > 1 else min(2, layout.num_experts)
    hidden_states = torch.randn(2, layout.hidden_size, generator=torch.Generator().manual_seed(0))
    first = torch.arange(slots) * ((layout.num_experts - 1) // max(1, slots - 1) or 1)
    ids = torch.stack([first, layout.num_experts - 1 - first])
    weights = torch.stack([torch.linspace(0.9, 0.35, slots), torch.linspace(0.2, 0.6, slots)])
    dtype = TORCH_DTYPES[layout.dtype]
    return hidden_states.to(device, dtype), ids.to(device), weights.to(device, dtype)
