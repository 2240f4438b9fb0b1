"""A device as the current one: where kernels are launched, wherever the tensors are that they are given."""

from __future__ import annotations

import contextlib

import torch

_AS_IT_IS = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """`device` as the current one, for launches past torch's own operations, which need no telling."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        # Making it what it is would take the host a microsecond.
        return _AS_IT_IS
    return torch.cuda.device(device)
