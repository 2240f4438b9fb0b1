"""Launches become compilations for a GPU that is not here, so that tensors may stay on the CPU, with any content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver, jit

from moe_core.backends.triton import device
from moe_core.kernels.triton import ids as triton_ids


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


def compile_only(capability: int, told: Callable[[str, int], None]) -> None:
    """From now on, in this process, nothing is launched.

    Args:
        capability: Of the GPU, 90 for Hopper.
        told: Called at each launch with the kernel's name and the bytes of shared memory that a program of it takes.
    """
    driver.set_active(_Target(capability))
    run = jit.JITFunction.run

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        told(self.fn.__name__, kernel.metadata.shared)
        return kernel

    jit.JITFunction.run = compiled
    # Such a GPU has dependent launches, the interpreter has none.
    device._INTERPRETED = attrs.evolve(device._INTERPRETED, pdl=True)
    triton_ids.has_dependent_launches = lambda device: True
    # What is compiled already would be launched.
    CompiledKernel.run = lambda self, *arguments: None
