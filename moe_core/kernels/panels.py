"""Weights cut into panels: rows and columns of a tile of a GEMM, which lie in one stretch of memory as it reads them.

Of rows as they are stored, a tile reads as many stretches of 128 bytes as it has rows, kilobytes apart.
"""

from __future__ import annotations

from moe_core.payloads import Tensor

#: Most rows of a panel: those of the largest tile.
_MOST_ROWS = 256
#: Bytes of a row in a panel: a line of the cache, and the widest row that the bulk copy engine lays out for a product.
ROW_BYTES = 128


def panel_rows(num_rows: int) -> int:
    """Rows of a panel of a projection with so many: the largest power of two that divides them, 256 at most."""
    return min(_MOST_ROWS, num_rows & -num_rows)


def new_panels(weight: Tensor) -> Tensor:
    """Room for the panels of `weight [L, N, C]`, of its dtype: `[L, N / rows, C / columns, rows, columns]`.

    `columns` are 128 bytes of it, and divide `C`.
    """
    num_experts, num_rows, num_columns = weight.shape
    rows, columns = panel_rows(num_rows), ROW_BYTES // weight.element_size()
    return weight.new_empty((num_experts, num_rows // rows, num_columns // columns, rows, columns))


def fill_panels(panels: Tensor, weight: Tensor, *, in_halves: bool) -> None:
    """Copy one expert's weight.

    Args:
        panels: `[N / rows, C / columns, rows, columns]`, contiguous.
        weight: `[N, C]`, any strides.
        in_halves: All gate rows come before all up rows; in panels they alternate.
    """
    count, steps, rows, columns = panels.shape
    halves = 2 if in_halves else 1
    source = weight.view(halves, count, rows // halves, steps, columns)
    panels.view(count, steps, rows // halves, halves, columns).copy_(source.permute(1, 3, 2, 0, 4))
