"""FP8 experts modules of transformers with random numbers, and what they compute in float64.

Built explicitly: without an accelerator transformers would silently load an FP8 checkpoint as bfloat16.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from stored_experts import E2M1
from transformers import MixtralConfig
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

from moe_core.integrations.transformers import NAME


def build(
    *,
    hidden: int = 256,
    inner: int = 128,
    has_gate: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    config: dict[str, Any] | None = None,
    base: type[torch.nn.Module] = FP8Experts,
    **arguments: Any,
) -> Any:
    """Four experts; `arguments` are the module's own (`block_size`, `activation_scheme`, `scale_fmt`)."""
    options = MixtralConfig(
        hidden_size=hidden, intermediate_size=inner, num_local_experts=4, num_experts_per_tok=2, dtype=dtype
    )
    options._experts_implementation = NAME
    for name, value in (config or {}).items():
        setattr(options, name, value)
    # The decorator changes its class; the one of transformers stays as it is.
    plain = {name: inspect.unwrap(getattr(base, name)) for name in ("__init__", "forward")}
    derived = type(base.__name__, (base,), plain)
    decorated = use_experts_implementation(
        derived, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS, has_gate=has_gate, has_bias=False
    )
    experts = decorated(options, has_gate=has_gate, **arguments)
    randomize_(experts, torch.Generator().manual_seed(3))
    return experts.eval()


@torch.no_grad()
def randomize_(experts: torch.nn.Module, generator: torch.Generator) -> None:
    """Fill the parameters in place: no two scales are alike, up is larger than gate, static scales clamp a little."""
    for name, parameter in experts.named_parameters():
        if name.endswith("activation_scale"):
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.002 + 0.004)
        elif parameter.dtype == torch.int8:
            parameter.copy_(torch.randint(-128, 128, parameter.shape, generator=generator))
        elif parameter.dtype == torch.float8_e4m3fn:
            values = torch.randn(parameter.shape, generator=generator) * 60.0
            values[:, parameter.shape[1] // 2 :] *= 1.7
            # Conversions saturate from torch 2.13 on; before, they make NaN.
            parameter.copy_(values.clamp(-448, 448))
        elif parameter.dtype == torch.float8_e8m0fnu:
            exponents = torch.randint(117, 121, parameter.shape, generator=generator, dtype=torch.uint8)
            parameter.copy_(exponents.view(torch.float8_e8m0fnu))
        else:
            parameter.copy_((torch.rand(parameter.shape, generator=generator) * 3.0 + 0.5) * 1e-3)


def values(weight: torch.Tensor, scale: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """One expert's matrix in float64; `tile` is the (rows, columns) of one scale."""
    if weight.dtype == torch.int8:
        codes = weight.view(torch.uint8).long()
        weight = torch.stack([E2M1[codes & 15], E2M1[codes >> 4]], dim=-1).flatten(1)
    rows = torch.arange(weight.shape[0]) // tile[0]
    columns = torch.arange(weight.shape[1]) // tile[1]
    return weight.double() * scale.double()[rows][:, columns]


def rounded(x: torch.Tensor, *, group: int, power_of_two: bool = False, scale: torch.Tensor | None = None) -> Any:
    """A row `[C]` as an e4m3 GEMM sees it, in float64; groups of channels, or one given scale."""
    if scale is not None:
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()
    parts = []
    for part in x.float().split(group):
        step = part.abs().max() / 448
        step = torch.exp2(torch.ceil(torch.log2(step))) if power_of_two else step
        parts.append((part / step).to(torch.float8_e4m3fn).double() * step.double())
    return torch.cat(parts)


def tokens(num_tokens: int, hidden: int, dtype: torch.dtype, top_k: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    hidden_states = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    scores, index = torch.rand(num_tokens, 4, generator=generator).topk(top_k, dim=-1)
    return hidden_states, index, scores


@torch.no_grad()
def reference(
    experts: Any,
    routed: tuple[torch.Tensor, ...],
    first_tile: tuple[int, int],
    down_tile: tuple[int, int],
    **rounding: Any,
) -> torch.Tensor:
    """The layer slot by slot in float64 with the module's gate; `rounding` goes to `rounded`."""
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    first_scale = experts.gate_up_proj_scale_inv if experts.has_gate else experts.up_proj_scale_inv
    gate = experts._apply_gate if experts.has_gate else experts.act_fn
    is_static = experts.activation_scheme == "static"
    names = ("gate_up_proj_activation_scale", "down_proj_activation_scale")
    scales = [getattr(experts, name) if is_static else [None] * len(first) for name in names]
    hidden_states, ids, weights = routed
    out = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])):
        expert = ids[token, slot]
        row = rounded(hidden_states[token], scale=scales[0][expert], **rounding)
        row = gate(values(first[expert], first_scale[expert], first_tile) @ row)
        row = rounded(row, scale=scales[1][expert], **rounding)
        row = values(experts.down_proj[expert], experts.down_proj_scale_inv[expert], down_tile) @ row
        out[token] += weights[token, slot].double() * row
    return out
