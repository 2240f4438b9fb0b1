"""Quantized MoE layers on the Triton runners of an NVIDIA GPU, beside the bf16 layer of the same sizes.

Run: python benchmarks/gpu_quantized.py        (needs an NVIDIA GPU; --help lists the sizes)

Graphs, routings and medians as in gpu_layer.py. The stored weights are random bits of the right types: numbers are the
tests' business. The floor is the stored bytes of the active experts over the bandwidth measured in this run.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
import typer
from gpu_layer import SHAPES, bandwidth, microseconds
from rich.console import Console
from rich.table import Table

from moe_core import LayerRequest, MoELayer, RawWeights
from moe_core.quant import BF16, FP8_BLOCK128, MXFP4_W4A16, W8A8_INT8, QuantScheme
from moe_core.weights.expected import expected_tensors

SCHEMES = {
    "bf16": BF16,
    "fp8 blocks 128 x 128": FP8_BLOCK128,
    "int8 per channel": W8A8_INT8,
    "int4 groups of 128": QuantScheme(weight_dtype="int4", weight_block=(1, 128), weight_scale="bf16"),
    "mxfp4 weights": MXFP4_W4A16,
}


def random_weights(request: LayerRequest) -> dict[str, torch.Tensor]:
    """Finite values of every type; scales near one over the square root of the inputs."""
    tensors = {}
    for name, wanted in expected_tensors(request, request.num_experts).items():
        tensor = torch.empty(wanted.shape, dtype=wanted.dtypes[0], device="cuda")
        if name.endswith("_scale"):
            if tensor.dtype == torch.uint8:
                tensor.fill_(120)
            else:
                tensor.fill_(0.01)
        elif tensor.dtype == torch.float8_e4m3fn:
            # Any byte but the two that are NaN.
            tensor.view(torch.uint8).random_(0, 127)
        elif tensor.is_floating_point():
            tensor.normal_(std=0.02)
        else:
            tensor.random_(0, 128)
        tensors[name] = tensor
    return tensors


def layer_times(shape: str, scheme: QuantScheme, tokens: list[int], bytes_per_us: float) -> list[tuple[float, float]]:
    """(floor, microseconds) per token count."""
    experts, top_k, hidden, inner = SHAPES[shape]
    request = LayerRequest(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=inner,
        quant=scheme,
        runner_backend="triton",
    )
    weights = random_weights(request)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values()) / experts
    layer = MoELayer(request)
    layer.load_weights(RawWeights(tensors=weights, handed_over=True))
    times = []
    for count in tokens:
        sets = 16 if count == 1 else 4
        ids = torch.rand(sets, count, experts, device="cuda").topk(top_k, dim=-1).indices
        rows = torch.randn(sets, count, hidden, device="cuda").bfloat16()
        router = torch.rand(sets, count, top_k, device="cuda")
        active = sum(each.unique().numel() for each in ids) / sets
        calls = [partial(layer, rows[i], ids[i], router[i]) for i in range(sets)]
        time, _ = microseconds(calls, 9)
        times.append((active * size / bytes_per_us, time))
    return times


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "128x8",
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "1,16,64,256,2048",
) -> None:
    """Measure and print one table."""
    torch.manual_seed(0)
    bytes_per_us = bandwidth()
    torch.cuda.empty_cache()
    counts = [int(count) for count in tokens.split(",")]
    table = Table("scheme", *(f"T = {count}" for count in counts), title=f"us per layer (floor), {shape}")
    for name, scheme in SCHEMES.items():
        times = layer_times(shape, scheme, counts, bytes_per_us)
        table.add_row(name, *(f"{time:.0f} ({floor:.0f})" for floor, time in times))
    Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
