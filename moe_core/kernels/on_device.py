"""A device as the current one: where kernels are launched, wherever the tensors are that they are given.

Making a device current takes the host a microsecond or more, also where it is already, so that this is asked first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from moe_core.payloads import Tensor

_AS_IT_IS = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """`device` as the current one, for launches past torch's own operations, which need no telling."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(device)


def launching_on(device: torch.device, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` with `device` as the current one at each call: `on_device` for what is bound once.

    What stays is asked once, so that a call on the current device takes no context at all.
    """
    if device.type != "cuda":
        return function
    index = device.index

    def run(*arguments: Any) -> Tensor:
        if torch.cuda.current_device() == index:
            return function(*arguments)
        with torch.cuda.device(device):
            return function(*arguments)

    return run
