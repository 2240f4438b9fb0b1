"""What must be read of each stored tensor for one rank, and everything wrong with what the checkpoint has.

Nothing is read here but names, shapes and dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import attrs
import torch

from moe_core.errors import WeightsError
from moe_core.weights.bands import Band, PartShape, StoredLayout
from moe_core.weights.checkpoint import TensorSource
from moe_core.weights.names import Part
from moe_core.weights.spans import Cut, cut_elements, cut_tiles
from moe_core.weights.storages import StoredTensor, allowed_dtypes, is_known, is_needed, values_per_index

#: What is cut the same way for every expert: rows and columns, None where tiles do not fit.
_Cuts: TypeAlias = dict[tuple[StoredTensor, Band, torch.dtype], tuple[Cut, Cut] | None]

#: Roles whose tensors are read whole: one or two values per expert, or one per channel.
_WHOLE_ROLES = ("global_scale", "input_scale", "input_zero", "group_index")


@attrs.frozen(kw_only=True, eq=False)
class Read:
    """One part of one stored tensor of one expert.

    Attributes:
        part: The matrix it belongs to.
        shape: That matrix's sizes.
        tensor: Which of its tensors.
        band: Which rows; None for what has no rows.
        expert: Global id.
        name: Name in the checkpoint.
        slices: What is read.
        rows: Which rows of that to keep.
        columns: Which columns.
        turned: Stored as `[columns, rows]`.
        per: Values in one stored index of the packed axis.
        nbytes: Bytes that are read.
    """

    part: Part
    shape: PartShape
    tensor: StoredTensor
    band: Band | None
    expert: int
    name: str
    slices: tuple[slice, ...]
    rows: Cut | None = None
    columns: Cut | None = None
    turned: bool = False
    per: int = 1
    nbytes: int = 0


def is_scalar(tensor: StoredTensor, part: Part) -> bool:
    """Whether a tensor of a part is a number for each half or for the whole matrix."""
    if tensor.role in ("scale", "zero_point"):
        return part.storage.scheme.is_per_tensor
    return tensor.role in ("global_scale", "input_scale", "input_zero")


@attrs.frozen(kw_only=True)
class ReadPlanner:
    """Makes the reads of one layer.

    Attributes:
        source: Where the tensors are.
        names: Names of those that belong to the layer.
        num_experts: Experts of the layer.
        layout: What names and shapes do not tell.
        takes_b2: Whether this rank takes `b2`; the other tensor-parallel ranks have zeros, since ranks are summed.
        problems: Everything that is missing, misshapen or mistyped; filled while planning.
    """

    source: TensorSource
    names: frozenset[str]
    num_experts: int
    layout: StoredLayout
    takes_b2: bool
    problems: list[str] = attrs.field(factory=list)

    def reads(
        self, part: Part, shape: PartShape, experts: Sequence[int], others: Collection[int] = ()
    ) -> Iterator[Read]:
        """The reads of one part, expert by expert; of `others` the activation scales alone."""
        cuts: _Cuts = {}
        # Name -> whether its shape and dtype are right: tensors of all experts are met again with every expert.
        fits: dict[str, bool] = {}
        for expert in (*experts, *others):
            for tensor in self._wanted(part):
                if expert in others and tensor.role != "input_scale":
                    continue
                name = part.find(self.names, tensor, expert)
                if name is None:
                    self._miss(part, tensor, expert)
                    continue
                if name not in fits:
                    problem = self._problem(name, part, shape, tensor)
                    fits[name] = problem is None
                    if problem is not None:
                        self.problems.append(problem)
                if fits[name]:
                    yield from self._of_tensor(part, shape, tensor, expert, name, cuts)

    def _miss(self, part: Part, tensor: StoredTensor, expert: int) -> None:
        problem = f"{next(part.spellings(tensor, expert))}: missing"
        if is_needed(tensor, part.storage.scheme) and problem not in self.problems:
            self.problems.append(problem)

    def _wanted(self, part: Part) -> Iterator[StoredTensor]:
        scheme = part.storage.scheme
        for tensor in part.tensors:
            if tensor.role == "ignored" or not is_known(tensor, scheme):
                continue
            if tensor.role == "input_scale" and not is_needed(tensor, scheme):
                continue
            if tensor.role == "bias" and part.projection == "w2" and not self.takes_b2:
                continue
            if tensor.role in ("scale", "zero_point") and not scheme.is_quantized:
                continue
            yield tensor

    def _of_tensor(
        self,
        part: Part,
        shape: PartShape,
        tensor: StoredTensor,
        expert: int,
        name: str,
        cuts: _Cuts,
    ) -> Iterator[Read]:
        """What is read of the stored tensor `name`, whose shape and dtype are right."""
        dims, dtype = self.source.shape(name), self.source.dtype(name)
        read = functools.partial(Read, part=part, shape=shape, tensor=tensor, expert=expert, name=name)
        lead = (slice(expert, expert + 1),) if part.stacked and self._is_led(dims, tensor, part) else ()
        rest = dims[len(lead) :]
        if tensor.role in _WHOLE_ROLES or is_scalar(tensor, part):
            slices = (*lead, *(slice(0, size) for size in rest))
            yield read(band=None, slices=slices, nbytes=_nbytes(slices, dtype))
            return
        per = values_per_index(tensor, part.storage.scheme, dtype)
        turned = self._is_turned(tensor, part) and len(rest) > 1
        for band in shape.bands:
            if not band.rows.count or not shape.taken_columns.count:
                continue
            key = (tensor, band, dtype)
            if key not in cuts:
                cuts[key] = self._cuts(name, tensor, band, shape, per)
            found = cuts[key]
            if found is None:
                continue
            rows, columns = found
            slices = (*lead, *_slices(rest, rows, columns, tensor, turned))
            nbytes = _nbytes(slices, dtype)
            yield read(band=band, slices=slices, rows=rows, columns=columns, turned=turned, per=per, nbytes=nbytes)

    def _cuts(self, name: str, tensor: StoredTensor, band: Band, shape: PartShape, per: int) -> tuple[Cut, Cut] | None:
        """Rows and columns to read; None, and a problem, where tiles do not fit."""
        per_row = per if tensor.packed == "rows" else 1
        per_column = per if tensor.packed == "columns" else 1
        if tensor.role == "bias":
            return cut_elements(band.rows), Cut(slice(0, 1), slice(0, 1))
        if tensor.role == "weight":
            return cut_elements(band.rows, per_row), cut_elements(shape.taken_columns, per_column)
        (block_rows, block_columns), (tile_rows, tile_columns) = shape.block, shape.tile
        try:
            return (
                cut_tiles(band.scaled, block_rows, tile_rows, per_row),
                cut_tiles(shape.taken_columns, block_columns, tile_columns, per_column),
            )
        except WeightsError as error:
            self.problems.append(f"{name}: {error}")
            return None

    def _is_turned(self, tensor: StoredTensor, part: Part) -> bool:
        return tensor.transposed or (part.stacked and self.layout.orientation == "in_out")

    def _is_led(self, dims: tuple[int, ...], tensor: StoredTensor, part: Part) -> bool:
        """Whether the first axis counts experts: a single scale may be all experts'."""
        return not is_scalar(tensor, part) or dims not in ((), (1,)) or self.num_experts == len(dims) == 1

    def _problem(self, name: str, part: Part, shape: PartShape, tensor: StoredTensor) -> str | None:
        """What is wrong with the shape or the dtype of one stored tensor."""
        dims, dtype = self.source.shape(name), self.source.dtype(name)
        dtypes = allowed_dtypes(tensor, part.storage.scheme)
        fits = dtypes is None or dtype in dtypes
        # How many values an index holds follows from the dtype, if it is right.
        shapes = self._shapes(part, shape, tensor, dtype if fits or not dtypes else dtypes[0])
        if fits and dims in shapes:
            return None
        words = " or ".join(_word(wanted) for wanted in dtypes) if dtypes else "any dtype"
        wanted = " or ".join(str(list(dims)) for dims in dict.fromkeys(shapes))
        return f"{name}: expected {wanted} {words}, got {list(dims)} {_word(dtype)}"

    def _shapes(self, part: Part, shape: PartShape, tensor: StoredTensor, dtype: torch.dtype) -> list[tuple[int, ...]]:
        """Every shape that `tensor` may have, the usual one first."""
        lead = (self.num_experts,) if part.stacked else ()
        if is_scalar(tensor, part):
            single = [lead, (*lead, 1), (*lead, 1, 1), (), (1,)]
            pairs = [(*lead, 2), (*lead, 2, 1), (*lead, 1, 2)] if len(part.halves) == 2 else []
            return single + pairs
        if tensor.role == "bias":
            return [(*lead, shape.rows)]
        if tensor.role == "group_index":
            return [(*lead, shape.columns)]
        per = values_per_index(tensor, part.storage.scheme, dtype)
        is_weight = tensor.role == "weight"
        rows, columns = (shape.rows, shape.columns) if is_weight else (shape.scale_rows, shape.scale_columns)
        rows = -(-rows // per) if tensor.packed == "rows" else rows
        if tensor.packed == "columns":
            columns = -(-columns // per)
        if tensor.blocked:
            return [(*lead, rows, columns, 16)]
        sizes = (columns, rows) if self._is_turned(tensor, part) else (rows, columns)
        flat = [(*lead, rows)] if not is_weight and columns == 1 else []
        # Some writers keep the axes inside a tile, of size one.
        deep = [(*lead, sizes[0], 1, sizes[1], 1)] if tensor.role == "scale" and shape.block[0] > 1 else []
        return [(*lead, *sizes), *flat, *deep]


def left_over(names: frozenset[str], parts: Sequence[Part], num_experts: int) -> list[str]:
    """Those of `names` that no expert of the layer reads."""
    known = {
        part.find(names, tensor, expert)
        for part in parts
        for tensor in part.tensors
        if is_known(tensor, part.storage.scheme)
        for expert in (range(1) if part.stacked else range(num_experts))
    }
    return sorted(names - known)


def matrix_size(source: TensorSource, names: frozenset[str], part: Part) -> tuple[int, int]:
    """Rows and columns of a single matrix, as far as its packing tells: a last word is taken to be full.

    Raises:
        WeightsError: It has no weight, or one that is no matrix.
    """
    tensor = next(tensor for tensor in part.tensors if tensor.role == "weight")
    name = part.find(names, tensor, 0)
    if name is None:
        raise WeightsError(f"{next(part.spellings(tensor, 0))}: missing")
    dims = source.shape(name)
    if len(dims) != 2:
        raise WeightsError(f"{name}: expected a matrix, got {list(dims)}")
    per = values_per_index(tensor, part.storage.scheme, source.dtype(name))
    rows, columns = reversed(dims) if tensor.transposed else dims
    return (rows * per, columns) if tensor.packed == "rows" else (rows, columns * per)


def _slices(dims: tuple[int, ...], rows: Cut, columns: Cut, tensor: StoredTensor, turned: bool) -> tuple[slice, ...]:
    """What to read of one expert's tensor of shape `dims`: rows and columns as they are cut, other axes whole."""
    order: tuple[slice, ...] = (columns.read, rows.read) if turned else (rows.read, columns.read)
    if tensor.role == "scale" and len(dims) == 4:
        # The axes inside a tile, of size one.
        order = (order[0], slice(0, 1), order[1], slice(0, 1))
    return (*order[: len(dims)], *(slice(0, size) for size in dims[len(order) :]))


def _nbytes(slices: tuple[slice, ...], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for part in slices:
        count *= part.stop - part.start
    return count


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
