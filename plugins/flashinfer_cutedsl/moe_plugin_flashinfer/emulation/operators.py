"""Kernels as operators of torch: what one reads on the host is its own business, as on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Registered kernels live as long as this.
_LIBRARY = torch.library.Library("emulated_flashinfer", "DEF")  # type: ignore[no-untyped-call]


def operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the CPU kernel of `torch.ops.emulated_flashinfer.NAME`, of this schema."""

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(schema.partition("(")[0], kernel, "CPU")  # type: ignore[no-untyped-call]
        return kernel

    return register
