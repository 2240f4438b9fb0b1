"""Tiny MoE checkpoints of random floats, and float64 readers of every layout that the quantizer writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from reference_moe import decode_e2m1, decode_e4m3fn, decode_e8m0, expand_blocks, int4_values, unpack_nibbles
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

# H and I differ, neither is a multiple of 128 (so tiles are cut at edges), both are of 32.
HIDDEN, INNER, EXPERTS = 160, 96, 3
MODULE = "model.layers.1.mlp.experts"
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def expert_weights(seed: int = 0, hidden: int = HIDDEN, inner: int = INNER) -> dict[str, torch.Tensor]:
    """Half -> bf16 `[E, N, K]`; gate and up differ in size, and one row and one block of 32 are zeros."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    sizes = {"gate": 0.1, "up": 0.4, "down": 0.05}
    weights = {
        half: (torch.randn(EXPERTS, *shape, generator=generator) * sizes[half]).bfloat16()
        for half, shape in shapes.items()
    }
    for weight in weights.values():
        weight[1, 2] = 0
        weight[2, 5, :32] = 0
    return weights


def other_tensors() -> Tensors:
    """What a model has besides experts: embeddings, norms, attention, a dense layer, a router, a shared expert."""
    generator = torch.Generator().manual_seed(99)
    shapes = {
        "model.embed_tokens.weight": (11, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "model.layers.1.self_attn.q_proj.weight": (64, HIDDEN),
        "model.layers.1.mlp.gate.weight": (EXPERTS, HIDDEN),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (INNER, HIDDEN),
    }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def one_by_one(weights: Mapping[str, torch.Tensor], names: Mapping[str, str] = NAMES) -> Tensors:
    """Every expert's projections as tensors of their own."""
    return {
        f"{MODULE}.{expert}.{names[half]}.weight": weight[expert].clone()
        for half, weight in weights.items()
        for expert in range(len(weight))
    }


def fused(weights: Mapping[str, torch.Tensor]) -> Tensors:
    """All experts in one tensor per projection, gate and up together."""
    together = torch.cat([weights["gate"], weights["up"]], dim=1)
    return {f"{MODULE}.gate_up_proj": together, f"{MODULE}.down_proj": weights["down"].clone()}


def write_checkpoint(folder: Path, experts: Tensors, files: int = 1) -> Path:
    """Write a checkpoint; several files get the tensors in turn, so experts are torn apart."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {**other_tensors(), **experts}
    config = {"model_type": "qwen3_moe", "num_experts": EXPERTS, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    weight_map = {tensor: names[number % files] for number, tensor in enumerate(tensors)}
    for name in names:
        save_file({t: tensors[t] for t, file in weight_map.items() if file == name}, folder / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def read_tensors(folder: Path) -> Tensors:
    """Every tensor in a folder's safetensors files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _fp8(t: Tensors) -> torch.Tensor:
    rows, columns = t["weight"].shape
    return decode_e4m3fn(t["weight"].view(torch.uint8)) * expand_blocks(
        t["weight_scale_inv"].double(), rows, columns, 128, 128
    )


def _int8(t: Tensors) -> torch.Tensor:
    return t["weight"].double() * t["weight_scale"].double()


def _int4_rows(t: Tensors) -> torch.Tensor:
    codes = unpack_nibbles(t["weight"].view(torch.uint8).T).T
    return int4_values(codes).double() * t["weight_scale"].double()


def _e2m1(packed: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    return decode_e2m1(unpack_nibbles(packed)) * scale.repeat_interleave(group, -1)


def _nvfp4_modelopt(t: Tensors) -> torch.Tensor:
    scale = decode_e4m3fn(t["weight_scale"].view(torch.uint8)) * t["weight_scale_2"].double()
    return _e2m1(t["weight"], scale, 16)


def _nvfp4_compressed_tensors(t: Tensors) -> torch.Tensor:
    scale = decode_e4m3fn(t["weight_scale"].view(torch.uint8)) / t["weight_global_scale"].double()
    return _e2m1(t["weight_packed"], scale, 16)


def _mxfp4(t: Tensors) -> torch.Tensor:
    return _e2m1(t["weight_packed"], decode_e8m0(t["weight_scale"]), 32)


#: (scheme, ecosystem) -> what follows a projection's name, as tensors -> float64 `[N, K]`.
READERS: dict[tuple[str, str], Callable[[Tensors], torch.Tensor]] = {
    ("fp8_block128", "transformers"): _fp8,
    ("w8a8_int8", "compressed_tensors"): _int8,
    ("w8a8_int8", "modelslim"): _int8,
    ("w4a8_int8", "modelslim"): _int4_rows,
    ("w4a4_int4", "modelslim"): _int8,
    ("nvfp4", "modelopt"): _nvfp4_modelopt,
    ("nvfp4", "compressed_tensors"): _nvfp4_compressed_tensors,
    ("mxfp4_w4a16", "compressed_tensors"): _mxfp4,
}


def of_projection(tensors: Tensors, name: str) -> Tensors:
    """What follows a projection's name -> tensor."""
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
