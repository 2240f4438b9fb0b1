"""Bytes read over bytes needed, when ranks load their share of a sharded checkpoint; and the rate.

The files are small enough for the page cache and the rate counts CPU seconds of one thread, so that it is the rate of
this code and not of a disk.

Run: python benchmarks/loading.py        (no accelerator needed; writes about 1 GB to a temporary folder)
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from moe_core import LayerRequest
from moe_core.quant import (
    BF16,
    FP8_BLOCK128,
    NVFP4,
    QuantScheme,
    StoredLayer,
    StoredScheme,
)
from moe_core.weights.checkpoint import INDEX_FILE, Checkpoint
from moe_core.weights.loading import load_experts

MODULE = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INNER, SHARDS = 64, 2048, 768, 4
INT4 = QuantScheme(weight_dtype="int4", weight_block=(1, 128), weight_scale="fp32", zero_point=True)


def random_like(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, or small positive numbers for scales."""
    if dtype in (torch.float32, torch.float16):
        return torch.rand(shape, dtype=dtype) + 0.5
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 120, (size,), dtype=torch.uint8).view(dtype).view(shape)


def plain(rows: int, columns: int) -> dict[str, Any]:
    return {"weight": ((rows, columns), torch.bfloat16)}


def fp8(rows: int, columns: int) -> dict[str, Any]:
    return {
        "weight": ((rows, columns), torch.float8_e4m3fn),
        "weight_scale_inv": ((rows // 128, columns // 128), torch.float32),
    }


def nvfp4(rows: int, columns: int) -> dict[str, Any]:
    return {
        "weight": ((rows, columns // 2), torch.uint8),
        "weight_scale": ((rows, columns // 16), torch.float8_e4m3fn),
        "weight_scale_2": ((), torch.float32),
        "input_scale": ((), torch.float32),
    }


def gptq(rows: int, columns: int) -> dict[str, Any]:
    return {
        "qweight": ((columns // 8, rows), torch.int32),
        "qzeros": ((columns // 128, rows // 8), torch.int32),
        "scales": ((columns // 128, rows), torch.float16),
    }


def awq(rows: int, columns: int) -> dict[str, Any]:
    return gptq(rows, columns) | {"qweight": ((columns, rows // 8), torch.int32)}


STORAGES: dict[str, tuple[QuantScheme, Any]] = {
    "plain": (BF16, plain),
    "scaled": (FP8_BLOCK128, fp8),
    "modelopt_nvfp4": (NVFP4, nvfp4),
    "gptq": (INT4, gptq),
    "awq": (INT4, awq),
}


def write_checkpoint(folder: Path, storage: str) -> None:
    """A sharded layer with one set of tensors per expert and projection."""
    weight_map = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        tensors = {}
        for expert in range(shard, EXPERTS, SHARDS):
            for word, rows, columns in (
                ("gate_proj", INNER, HIDDEN),
                ("up_proj", INNER, HIDDEN),
                ("down_proj", HIDDEN, INNER),
            ):
                for suffix, (shape, dtype) in STORAGES[storage][1](rows, columns).items():
                    tensors[f"{MODULE}.{expert}.{word}.{suffix}"] = random_like(shape, dtype)
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def load(folder: Path, storage: str, **split: int) -> tuple[int, int, float]:
    """Bytes read, bytes of the canonical tensors, CPU seconds of a second load."""
    scheme = STORAGES[storage][0]
    request = LayerRequest(
        num_experts=EXPERTS, top_k=8, hidden_size=HIDDEN, intermediate_size=INNER, quant=scheme, **split
    )
    stored = StoredLayer(StoredScheme(scheme, storage), StoredScheme(scheme, storage))
    for _ in range(2):
        with Checkpoint(folder) as checkpoint:
            start = time.process_time()
            weights = load_experts(checkpoint, MODULE, request, stored)
            seconds = time.process_time() - start
            size = sum(tensor.numel() * tensor.element_size() for tensor in weights.tensors.values())
            read = checkpoint.bytes_read
    return read, size, seconds


def needed(folder: Path, split: int) -> float:
    """An equal part of everything on disk: what one of `split` ranks cannot do without."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as data:
            header = int.from_bytes(data.read(8), "little")
        total += file.stat().st_size - 8 - header
    return total / split


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    console.print(f"{EXPERTS} experts, hidden {HIDDEN}, intermediate {INNER}, {SHARDS} shards; sizes in MB")
    table = Table("storage", "split", "needed", "read", "read / needed", "canonical", "GB / CPU s")
    for storage in STORAGES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_checkpoint(folder, storage)
            for label, split in (("ep 8", {"ep_size": 8}), ("tp 4", {"tp_size": 4}), ("none", {})):
                read, size, seconds = load(folder, storage, **split)
                part = needed(folder, *split.values() or (1,))
                row = (f"{part / 1e6:.2f}", f"{read / 1e6:.2f}", f"{read / part:.4f}", f"{size / 1e6:.2f}")
                table.add_row(storage, label, *row, f"{read / seconds / 1e9:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
