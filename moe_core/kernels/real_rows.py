"""Which rows of a padded format exist, and functions that look at no others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_core.payloads import Tensor


def real_rows(rows: Tensor, real: Tensor | None) -> Tensor | None:
    """Indices of the rows of `rows [..., C]`, flattened, that hold something; None where all are to be computed.

    Finding them waits for the device, so that elsewhere than on CPU undefined rows are computed like the others, to
    results as undefined.

    Args:
        rows: Flat rows `[R, C]` or blocks of rows `[L, M, C]`.
        real: For flat rows `[R]`, each one's expert, -1 for none; for blocks `[L]`, the rows of each; None for all.
    """
    if real is None or rows.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if rows.dim() == 2:
        return (real >= 0).nonzero()[:, 0]
    return (torch.arange(rows.shape[1], device=rows.device) < real[:, None]).flatten().nonzero()[:, 0]


def map_rows(function: Callable[[Tensor], Tensor], rows: Tensor, width: int, real: Tensor | None) -> Tensor:
    """`function` of `[rows, C]` -> `[rows, width]`, on the real rows of `rows` alone; in the format of `rows`."""
    flat, index = rows.reshape(-1, rows.shape[-1]), real_rows(rows, real)
    if index is None:
        return function(flat).view(*rows.shape[:-1], width)
    values = function(flat[index])
    out = values.new_empty((flat.shape[0], width))
    out[index] = values
    return out.view(*rows.shape[:-1], width)
