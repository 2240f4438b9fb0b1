"""Launching compiled kernels again, without Triton looking at every argument of every launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import torch
from triton import knobs
from triton.runtime import JITFunction, driver

from moe_core.payloads import Tensor

#: What a variant is compiled with: compile-time arguments by their names, and Triton's options.
Constants: TypeAlias = tuple[dict[str, Any], dict[str, Any]]


def divided_up(total: int, part: int) -> int:
    """`total / part`, rounded up; Triton's own is a function of its language, which takes microseconds."""
    return -(-total // part)


def power_of_two(least: int) -> int:
    """The smallest power of two from `least` on, at least 2."""
    return 1 << max(1, (least - 1).bit_length())


@functools.cache
def has_dependent_launches(device: torch.device) -> bool:
    """Whether a launch may start while the one before it ends (see the package)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def is_aligned(tensor: Tensor) -> bool:
    """Whether Triton compiles loads of 16 bytes for it."""
    return tensor.data_ptr() % 16 == 0


def looked_at(*arguments: Tensor | int | None) -> tuple[Hashable, ...]:
    """What Triton compiles a variant for, of arguments that may be anything: what a key has to hold of them."""
    return tuple(map(_kind, arguments))


def _kind(argument: Tensor | int | None) -> Hashable:
    if argument is None:
        return None
    if isinstance(argument, int):
        return (argument == 1, argument % 16 == 0, argument < 1 << 31)
    return argument.dtype, argument.data_ptr() % 16 == 0


class Launches:
    """The compiled variants of one kernel for one owner, whose arguments mostly stay the same.

    Triton derives from all arguments which variant a launch needs, which takes longer on the CPU than a small kernel
    does on a GPU. An owner knows the few that may change between its calls. Mostly it calls `unit` what compile-time
    arguments and options follow from, and makes both of it only for a new variant:

        key = unit, looked_at(*tensors, *sizes)
        launches(key, grid, arguments, partial(constants, *unit))
    """

    def __init__(self, kernel: Any) -> None:
        """Nothing is compiled yet.

        Args:
            kernel: A function of `triton.jit` whose compile-time arguments come last.
        """
        self._kernel = kernel
        # The interpreter compiles nothing.
        self._is_compiled = isinstance(kernel, JITFunction)
        self._variants: dict[Hashable, tuple[Any, tuple[None, ...]]] = {}

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: Callable[[], Constants],
    ) -> None:
        """Launch on the current device and stream.

        Args:
            key: Equal for two calls of this owner only if one variant serves both: compile-time arguments and options,
                dtypes, None or not, alignment of pointers (`is_aligned`) and, of integers that the kernel specializes
                on, whether they are 1, multiples of 16 and within 32 bits. The current device is added to it.
            grid: Programs.
            arguments: All that are no compile-time arguments, in order.
            constants: Gives what the variant is compiled with; only called for a new key.
        """
        # Under `torch.compile`, torch takes the launch into its graph, and there is nothing to keep.
        if not self._is_compiled or torch.compiler.is_compiling():
            values, options = constants()
            self._kernel[grid](*arguments, **values, **options)
            return
        device = driver.active.get_current_device()
        known = self._variants.get((device, key))
        if known is None:
            values, options = constants()
            kernel = self._kernel[grid](*arguments, **values, **options)
            self._variants[device, key] = kernel, (None,) * len(values)
            return
        kernel, placeholders = known
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            # A profiler wants to know about launches.
            kernel[grid](*arguments, *placeholders)
            return
        stream = driver.active.get_current_stream(device)
        kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments, *placeholders)
