"""A toy accelerator in place of a kernel library: torch underneath, one matrix product per expert that has rows."""

from __future__ import annotations

import torch


def grouped_gemm(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows by its matrix.

    Args:
        rows: `[R, C]`, grouped by expert.
        weights: `[L, C, N]`.
        counts: `[L]`, rows of each expert.
        ends: `[L]`, row after each expert's group.

    Returns:
        `[R, N]`; rows that belong to no expert are undefined memory.
    """
    out = rows.new_empty((rows.shape[0], weights.shape[2]))
    start = 0
    for expert, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True)):
        if count:
            out[start : start + count] = rows[start : start + count] @ weights[expert]
        start = end
    return out
