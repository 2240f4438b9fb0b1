"""What a layer of the Triton runners costs the CPU per call outside a graph, and in which functions.

Run: python benchmarks/gpu_launch.py        (needs an NVIDIA GPU)

`moe-core bench --issue-time` says it at one token, for all implementations. From two tokens on the kernels of a real
layer outlast their launches; the experts are small here, so that the GPU is never behind.
"""

from __future__ import annotations

import cProfile
import pstats
from typing import Annotated

import torch
import typer

from moe_core import MoELayer, RawWeights
from moe_core.tuning.layers import random_weights
from moe_core.tuning.shapes import SHAPES, LayerShape
from moe_core.tuning.timing import issue_microseconds

_SMALL = LayerShape(128, 8, 256, 128)
_ROUNDS = 5
_PROFILED_CALLS = 1000


def make_call(shape: LayerShape, num_tokens: int) -> tuple[MoELayer, tuple[torch.Tensor, ...]]:
    """A bf16 layer and its arguments."""
    request = shape.request(runner_backend="triton")
    layer = MoELayer(request)
    layer.load_weights(RawWeights(tensors=random_weights(request, "cuda"), handed_over=True))
    ids = torch.rand(num_tokens, shape.num_experts, device="cuda").topk(shape.top_k, dim=-1).indices
    hidden = torch.randn(num_tokens, shape.hidden_size, device="cuda").bfloat16()
    return layer, (hidden, ids, torch.rand(ids.shape, device="cuda"))


def profile(layer: MoELayer, tokens: tuple[torch.Tensor, ...]) -> None:
    """Where the time goes, function by function; a profiled call takes longer."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(_PROFILED_CALLS):
        layer(*tokens)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(16)


def main(
    tokens: Annotated[str, typer.Option(help="Numbers of tokens, separated by commas.")] = "1,2,16,256,1024",
    profiled: Annotated[bool, typer.Option("--profile", help="Also which functions take the time.")] = False,
) -> None:
    """Measure and print."""
    print(torch.cuda.get_device_name(), torch.__version__)
    for num_tokens in map(int, tokens.split(",")):
        layer, arguments = make_call(SHAPES["qwen3-30b-a3b"] if num_tokens == 1 else _SMALL, num_tokens)
        times = [issue_microseconds(lambda: layer(*arguments), "cuda") for _ in range(_ROUNDS)]  # noqa: B023
        print(f"T = {num_tokens}: {min(times):.1f} us", flush=True)
        if profiled:
            profile(layer, arguments)


if __name__ == "__main__":
    typer.run(main)
