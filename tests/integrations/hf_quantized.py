"""Tiny models on disk with experts in any storage, and the same models with experts in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from quantized import rounding
from safetensors.torch import load_file
from stored_experts import WRITERS, Matrix, save
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_core.model_config import QUANT_FILES
from moe_core.quant import QuantScheme, StoredScheme, read_layer

EXPERTS, HIDDEN, INNER, LAYERS = 4, 64, 96, 2
MODULES = tuple(f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS))
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
# Norm of the error of the logits over their norm: fp32 sums of some hundred terms in the float experts, through two
# layers; where activations are rounded, now and then a code falls to the other side (2**-4 of one fp8 number, more of
# an int4 or fp4 one).
TOLERANCE = {"same": 2e-5, "int8": 2e-3, "fp8": 4e-3, "fp4": 2e-2, "int4": 2e-2}
WORDS = ("gate_proj", "up_proj", "down_proj")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
Q_PROJ = "model.layers.0.self_attn.q_proj"


@attrs.define(eq=False)
class Projection:
    """One projection of all experts: float64 `[E, N, K]`, and what its inputs are rounded to."""

    values: torch.Tensor
    scheme: QuantScheme
    input_scale: torch.Tensor | None


class ReferenceExperts(nn.Module):
    """Slot by slot in float64; activations are rounded as the schemes say."""

    def __init__(self, first: Projection, second: Projection) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, hidden_states: Any, ids: Any, weights: Any) -> torch.Tensor:
        out = torch.zeros(hidden_states.shape, dtype=torch.float64)
        for token, slot in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])):
            expert = ids[token, slot]
            row = _product(self.first, expert, hidden_states[token][None])
            gate, up = row.chunk(2, dim=-1)
            row = _product(self.second, expert, nn.functional.silu(gate) * up)
            out[token] += weights[token, slot].double() * row[0]
        return out.to(hidden_states.dtype)


def _product(projection: Projection, expert: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return rounding(projection.scheme, projection.input_scale)(row, expert[None]) @ projection.values[expert].T


def write_qwen(folder: Path, quantization: dict[str, Any] | None, dtype: str = "float32") -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE model whose experts are stored as `quantization` says; the answer computes the same in float64."""
    config = Qwen3MoeConfig(
        **{**_SIZES, "dtype": dtype}, intermediate_size=INNER, moe_intermediate_size=INNER, num_experts=EXPERTS
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if ".mlp.experts." not in name}
    generator = torch.Generator().manual_seed(1)
    for layer, module in enumerate(MODULES):
        stored = read_layer(quantization, module, "fp32")
        gate, up = (_write(tensors, f"{module}.{{}}.{word}_proj", stored.w13, generator) for word in ("gate", "up"))
        down = _write(tensors, f"{module}.{{}}.down_proj", stored.w2, generator)
        scales = [scale for scale in (gate.input_scale, up.input_scale) if scale is not None]
        both = Projection(
            torch.cat([gate.values, up.values], dim=1), gate.scheme, torch.stack(scales).amax(0) if scales else None
        )
        model.model.layers[layer].mlp.experts = ReferenceExperts(both, down)
    _save(folder, config, tensors, quantization)
    return model


def write_gpt_oss(folder: Path) -> GptOssForCausalLM:
    """A gpt-oss model in MXFP4 with biases, interleaved rows and its clamped gate; the answer has float experts."""
    config = GptOssConfig(
        **_SIZES, intermediate_size=INNER, num_local_experts=EXPERTS, layer_types=["full_attention"] * LAYERS
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "experts." not in name}
    generator = torch.Generator().manual_seed(1)
    for module in MODULES:
        experts = model.get_submodule(module)
        stored = read_layer(quantization, module, "fp32")
        for word, storage in (("gate_up_proj", stored.w13), ("down_proj", stored.w2)):
            parameter, bias = getattr(experts, word), getattr(experts, f"{word}_bias")
            _, columns, rows = parameter.shape
            matrices = [WRITERS[storage.storage](generator, rows, columns, storage.scheme) for _ in range(EXPERTS)]
            for suffix in matrices[0].tensors:
                tensors[f"{module}.{word}_{suffix}"] = torch.stack([matrix.tensors[suffix] for matrix in matrices])
            with torch.no_grad():
                parameter.copy_(torch.stack([matrix.values.T for matrix in matrices]))
                bias.normal_(generator=generator)
            tensors[f"{module}.{word}_bias"] = bias.detach()
    _save(folder, config, tensors, quantization)
    return model


def write_float_mixtral(folder: Path) -> MixtralForCausalLM:
    """A model of floats, as transformers saves it; its experts weigh as much as its attention."""
    torch.manual_seed(0)
    config = MixtralConfig(**_SIZES, intermediate_size=INNER, num_local_experts=EXPERTS)
    model = MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Write the weight file again with other tensors; None takes one away. Dots in names are double underscores."""
    tensors = load_file(folder / "model.safetensors")
    for word, tensor in changes.items():
        name = word.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save(folder, tensors)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _write(tensors: dict[str, torch.Tensor], name: str, stored: StoredScheme, generator: torch.Generator) -> Projection:
    rows, columns = (HIDDEN, INNER) if "down" in name else (INNER, HIDDEN)
    matrices: list[Matrix] = []
    for expert in range(EXPERTS):
        matrix = WRITERS[stored.storage](generator, rows, columns, stored.scheme)
        tensors |= {f"{name.format(expert)}.{suffix}": tensor for suffix, tensor in matrix.tensors.items()}
        matrices.append(matrix)
    scales = [matrix.input_scale for matrix in matrices if matrix.input_scale is not None]
    values = torch.stack([matrix.values for matrix in matrices])
    # One for all experts: the largest.
    return Projection(values, stored.scheme, torch.full((EXPERTS,), max(scales)) if scales else None)


def _save(folder: Path, config: Any, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None) -> None:
    save(folder, tensors)
    content = config.to_dict() | {"architectures": ["unused"]}
    # Some describe the quantization in a file of their own.
    file = next((f for f, method in QUANT_FILES.items() if method == (quantization or {}).get("quant_method")), None)
    if file == "quant_model_description.json":
        (folder / file).write_text(json.dumps({k: v for k, v in (quantization or {}).items() if k != "quant_method"}))
    elif quantization:
        content["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(content, default=str))


def change(name: str, tensor: torch.Tensor | None) -> dict[str, Any]:
    """Arguments of `edit` for one tensor."""
    return {name.replace(".", "__"): tensor}
