"""Poison for memory that nobody may read, and a record of state that nobody may change."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_core.payloads import Tensor

_UNINITIALISED = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty_permuted,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)


def poison(tensor: Tensor) -> Tensor:
    """Fill with what shows in any result: NaN, or a number far outside every range. Gives the tensor back."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return tensor
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        # All ones but the sign: NaN in e4m3fn, e5m2 and e8m0 (there with the sign).
        tensor.view(torch.uint8).fill_(255)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 2)
    return tensor


class PoisonedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, memory that torch would leave uninitialised is poisoned: fresh pages are zero and hide who reads them."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Poison what an allocation returns."""
        result = function(*args, **(kwargs or {}))
        return poison(result) if function.overloadpacket in _UNINITIALISED else result


@attrs.frozen
class State:
    """What is global in a process and a backend must leave as it found it: name -> value."""

    values: dict[str, object]

    @classmethod
    def now(cls) -> State:
        """The present state."""
        environ = {f"os.environ[{name!r}]": value for name, value in os.environ.items()}
        return cls({**environ, **_torch_state(), "sys.path": tuple(sys.path), "random.getstate()": random.getstate()})

    def changed_since(self, earlier: State) -> list[str]:
        """Names whose value is another, or is new or gone."""
        names = {*self.values, *earlier.values}
        return sorted(name for name in names if self.values.get(name) != earlier.values.get(name))


def restore_variables(variables: Mapping[str, str]) -> None:
    """Give this process the environment variables of another time.

    A process inherits those of the one that started it, with all that a backend may have set there.
    """
    os.environ.clear()
    os.environ.update(variables)


def _torch_state() -> dict[str, object]:
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.random.get_rng_state()": tuple(torch.random.get_rng_state().tolist()),
    }


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals itself and zeros keep their signs."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one shape, dtype and content."""
    alike = first.shape == second.shape and first.dtype == second.dtype
    return alike and torch.equal(bits(first), bits(second))


def changed(before: Iterable[tuple[str, Tensor]], now: dict[str, Tensor]) -> list[str]:
    """Names of the tensors whose bits are no longer those of `before`."""
    return [name for name, tensor in before if not same_bits(tensor, now[name])]
