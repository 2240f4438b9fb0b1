"""Compiles what layers of several schemes launch, for one GPU generation, on a machine without any GPU.

Run by a test in a process of its own: `python compile_kernels.py 90`. The interpreter takes code that the compiler
refuses; this finds it. Kernels are compiled instead of launched, so that tensors may stay on the CPU, with any content.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from layers import random_tokens
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit
from triton_layers import both_manager

from moe_core import LayerRequest, MoELayer, RawWeights
from moe_core.environment import load_environment
from moe_core.quant import BF16, FP8_BLOCK128, MXFP4_W4A16
from moe_core.weights.expected import expected_tensors

#: Scheme -> token counts: one token, few and many rows per expert.
LAYERS = {BF16: (1, 5, 900), FP8_BLOCK128: (5,), MXFP4_W4A16: (5,)}


class _Target:
    """Triton's driver interface, as far as compiling needs it."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0


def main(capability: int) -> None:
    """Compile, and print each kernel's name once per variant."""
    driver.set_active(_Target(capability))
    run = jit.JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        print(self.fn.__name__)
        return kernel

    jit.JITFunction.run = compile_only
    for scheme, token_counts in LAYERS.items():
        request = LayerRequest(
            num_experts=4, top_k=2, hidden_size=256, intermediate_size=128, quant=scheme, runner_backend="triton"
        )
        layer = MoELayer(request, environment=load_environment("h100"), manager=both_manager())
        shapes = expected_tensors(request, 4)
        layer.load_weights(RawWeights(tensors={n: torch.zeros(e.shape, dtype=e.dtypes[0]) for n, e in shapes.items()}))
        for count in token_counts:
            layer(*random_tokens(request, count))


if __name__ == "__main__":
    main(int(sys.argv[1]))
