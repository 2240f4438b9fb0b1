"""The rows of gate and up: where they lie in stored matrices, in their scales, and in canonical ones.

A *band* is a run of rows that goes from one stored matrix to one place of the canonical one: the gate's, the up
half's, or all of a matrix.
"""

from __future__ import annotations

import attrs

from moe_core.errors import WeightsError
from moe_core.quant import WHOLE
from moe_core.request import LayerRequest
from moe_core.vocabulary import one_of
from moe_core.weights.canonical import LAYOUTS, ORIENTATIONS
from moe_core.weights.names import Part
from moe_core.weights.spans import Span, share

#: How tiles of a `w13` that holds both halves are counted: over all 2I rows, or from the first row of each half.
TILINGS = ("through", "apart")


@attrs.frozen(kw_only=True)
class StoredLayout:
    """What names and shapes of a checkpoint do not tell.

    Attributes:
        rows: Order of gate and up rows in a matrix that holds both, one of `LAYOUTS`; None: as the layer's activation
            says (`gate_up` mostly).
        orientation: `out_in`, or `in_out` for stacked experts stored as `[E, in, out]`, scales alike.
        tiling: `through` or `apart` for scales of row tiles in a matrix that holds both halves; needed only where I
            is no multiple of the tile, since otherwise both are the same.
    """

    rows: str | None = attrs.field(default=None, validator=attrs.validators.optional(one_of(*LAYOUTS)))
    orientation: str = attrs.field(default="out_in", validator=one_of(*ORIENTATIONS))
    tiling: str | None = attrs.field(default=None, validator=attrs.validators.optional(one_of(*TILINGS)))


@attrs.frozen(kw_only=True)
class Band:
    """One run of rows.

    Attributes:
        rows: Positions in the stored rows.
        scaled: The same rows as the stored scales count them.
        target: First row in the canonical matrix, and distance to the next one.
    """

    rows: Span
    scaled: Span
    target: tuple[int, int] = (0, 1)


@attrs.frozen(kw_only=True)
class PartShape:
    """One part as a rank sees it.

    Attributes:
        rows: Stored rows of the whole matrix.
        columns: Its columns.
        scale_rows: Rows of its scales.
        scale_columns: Columns of its scales.
        bands: What this rank takes of the rows.
        taken_columns: What it takes of the columns.
        block: Rows and columns that share a stored scale.
        tile: Rows and columns that share a canonical one.
    """

    rows: int
    columns: int
    scale_rows: int
    scale_columns: int
    bands: tuple[Band, ...]
    taken_columns: Span
    block: tuple[int, int]
    tile: tuple[int, int]


def part_shape(part: Part, request: LayerRequest, tp_rank: int, layout: StoredLayout) -> PartShape:
    """The sizes of one stored matrix and what tensor-parallel rank `tp_rank` takes of it.

    Raises:
        WeightsError: The order of the rows, or how they are tiled, allows no exact answer or is not known.
    """
    inner, hidden = request.intermediate_size, request.hidden_size
    local = share(inner, request.local_intermediate_size, tp_rank)
    is_w13 = part.projection == "w13"
    rows, columns = (inner * len(part.halves), hidden) if is_w13 else (hidden, inner)
    block = part.storage.scheme.block_of(rows, columns)
    taken = Span(0, hidden, hidden) if is_w13 else local
    local_scheme = request.local_quant.w13 if is_w13 else request.local_quant.w2
    local_rows = request.activation.rows_per_channel * local.size if is_w13 else hidden
    tile = local_scheme.block_of(local_rows, taken.size)
    scale_rows = -(-rows // block[0])
    if not is_w13:
        bands: tuple[Band, ...] = (Band(rows=Span(0, hidden, hidden), scaled=Span(0, hidden, hidden)),)
    else:
        apart = _is_apart(part, inner, block[0], layout)
        bands = _bands(part, request, local, block[0], tile[0], layout, apart)
        scale_rows = 2 * -(-inner // block[0]) if apart else scale_rows
    return PartShape(
        rows=rows,
        columns=columns,
        scale_rows=scale_rows,
        scale_columns=-(-columns // block[1]),
        bands=bands,
        taken_columns=taken,
        block=block,
        tile=tile,
    )


def _is_apart(part: Part, inner: int, block: int, layout: StoredLayout) -> bool:
    """Whether the scales of a matrix with both halves count each half from its own first row."""
    scheme = part.storage.scheme
    if len(part.halves) == 1 or not isinstance(scheme.weight_block, tuple) or scheme.weight_block[0] == WHOLE:
        return False
    if inner % block and layout.tiling is None:
        raise WeightsError(
            f"{part.base}: tiles of {block} rows do not fit {inner} gate rows; say StoredLayout(tiling='through') if "
            "they count all rows of the matrix, 'apart' if gate and up are tiled each on its own"
        )
    return layout.tiling == "apart" and inner % block != 0


def _bands(
    part: Part, request: LayerRequest, local: Span, block: int, tile: int, layout: StoredLayout, apart: bool
) -> tuple[Band, ...]:
    """What a rank takes of the rows of a matrix of `w13`.

    Args:
        part: The matrix, of both halves or of one.
        request: The layer.
        local: The rank's share of the I rows of a half.
        block: Rows that share a stored scale.
        tile: Rows that share a canonical one.
        layout: How the rows of a matrix with both halves are ordered.
        apart: See `_is_apart`.
    """
    inner, wanted = request.intermediate_size, request.activation.row_order
    stored, has_both = layout.rows or wanted, len(part.halves) == 2
    if not has_both and not request.activation.gated:
        return (Band(rows=local, scaled=local),)
    if has_both and stored == "interleaved" and apart:
        raise WeightsError(f"{part.base}: gate and up rows that alternate are not tiled apart")
    if has_both and stored == wanted == "interleaved":
        whole = Span(2 * local.start, 2 * local.count, 2 * local.size)
        return (Band(rows=whole, scaled=whole),)
    _check_tile(part, wanted, tile)
    targets = _halves(wanted, local.size)
    if not has_both:
        return (Band(rows=local, scaled=local, target=targets[part.halves[0]]),)
    # Rows of the scales, if each half begins with a tile of its own.
    stride = -(-inner // block) * block
    return tuple(
        Band(
            rows=local.within(offset, step),
            scaled=local.within(stride if apart and offset else offset, step),
            target=target,
        )
        for (offset, step), target in zip(_halves(stored, inner), targets, strict=True)
    )


def _halves(order: str, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the gate's and of the up half's `size` rows the first in a matrix of both, and the distance to the next."""
    if order == "interleaved":
        return (0, 2), (1, 2)
    return ((size, 1), (0, 1)) if order == "up_gate" else ((0, 1), (size, 1))


def _check_tile(part: Part, wanted: str, tile: int) -> None:
    scheme = part.storage.scheme
    if wanted == "interleaved" and tile > 1 and scheme.is_quantized and not scheme.is_per_tensor:
        raise WeightsError(
            f"{part.base}: the layer keeps gate and up rows alternating, so that tiles of {tile} rows would need the "
            "scales of both halves; use a layer with row_order 'gate_up'"
        )
