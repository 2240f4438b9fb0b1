"""Which positions of a stored axis a rank holds, and what must be read to get them."""

from __future__ import annotations

import attrs
import torch

from moe_core.errors import WeightsError
from moe_core.payloads import Tensor


@attrs.frozen
class Span:
    """Positions of one axis of a matrix: `start, start + step, ...`, then padding.

    Attributes:
        start: The first position.
        count: Positions that exist.
        size: Positions of the result; those past `count` are padding.
        step: Distance between two of them: 2 for the gate rows of interleaved ones.
    """

    start: int
    count: int
    size: int
    step: int = 1

    @property
    def covered(self) -> tuple[int, int]:
        """First and end of what is read. Gate and up rows that alternate are read together, so both cover the same."""
        first = self.start - self.start % self.step
        return first, first + self.step * self.count

    @property
    def padding(self) -> int:
        """Positions that do not exist in the checkpoint."""
        return self.size - self.count

    def within(self, offset: int, step: int = 1) -> Span:
        """The same positions in an axis that holds this one from `offset` on, `step` apart."""
        return Span(offset + step * self.start, self.count, self.size, step * self.step)


def share(full: int, size: int, rank: int) -> Span:
    """The `rank`-th piece of `size` positions of an axis of `full`; the last pieces may be padded or empty."""
    start = min(rank * size, full)
    return Span(start, min(size, full - start), size)


@attrs.frozen(eq=False)
class Cut:
    """What to read of one stored axis, and which of the values then to keep.

    Attributes:
        read: Stored indices.
        keep: Of the values, once they are unpacked: a slice, or the index of each.
    """

    read: slice
    keep: slice | Tensor

    def of(self, values: Tensor, axis: int) -> Tensor:
        """The kept values along `axis` of what was read."""
        if isinstance(self.keep, slice):
            return values[(slice(None),) * (axis % values.dim()) + (self.keep,)]
        return values.index_select(axis, self.keep)


def cut_elements(span: Span, per: int = 1) -> Cut:
    """The elements of `span` from an axis that stores `per` of them in each index."""
    first, end = span.covered
    read = slice(first // per, -(-end // per))
    origin = span.start - read.start * per
    return Cut(read, slice(origin, origin + span.step * span.count, span.step))


def cut_tiles(span: Span, block: int, tile: int, per: int = 1) -> Cut:
    """For each tile of `tile` positions of `span`, the stored block it lies in.

    Args:
        span: The positions.
        block: Positions that share a stored scale.
        tile: Positions that share a scale in the result: mostly `block`, less where a share ends inside one.
        per: Scales (zero points) stored in each index.

    Raises:
        WeightsError: A tile reaches over the end of a block: it would need two scales.
    """
    first, end = span.covered
    num_blocks = -(-end // block)
    read = slice(first // block // per, -(-num_blocks // per))
    # Arithmetic of the host, whatever device the caller has made the default.
    starts = torch.arange(0, span.count, tile, device="cpu")
    ends = (starts + tile).clamp(max=span.count) - 1
    blocks = (span.start + span.step * starts) // block
    if not torch.equal(blocks, (span.start + span.step * ends) // block):
        raise WeightsError(
            f"blocks of {block} do not fit tiles of {tile} from position {span.start} on in steps of {span.step}: "
            "some tiles would need two scales; choose a tensor-parallel size whose shares end where blocks end"
        )
    return Cut(read, _as_slice(blocks - read.start * per))


def _as_slice(indices: Tensor) -> slice | Tensor:
    """A slice where the indices are evenly apart: a view instead of a copy."""
    first, *rest = indices[:2].tolist() or [0]
    step = rest[0] - first if rest else 1
    if step <= 0:
        return indices
    end = first + step * len(indices)
    even = torch.arange(first, end, step, device=indices.device)
    return slice(first, end, step) if torch.equal(indices, even) else indices
