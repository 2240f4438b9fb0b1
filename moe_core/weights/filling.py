"""The canonical tensors of one rank, filled piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch

from moe_core.errors import WeightsError
from moe_core.payloads import Tensor, bias_name
from moe_core.quant import QuantScheme
from moe_core.request import LayerRequest
from moe_core.weights import content, pieces
from moe_core.weights.bands import StoredLayout
from moe_core.weights.expected import expected_tensors
from moe_core.weights.reads import Read

#: What a scale of padding is: one, so that nothing divides by zero.
_EXPONENT_OF_ONE = 127


class Filler:
    """Writes what is read to where it belongs.

    Attributes:
        tensors: The canonical tensors; there after `allocate`.
        problems: Everything found wrong with the content.
        order: Global expert id -> its first local row.
    """

    def __init__(
        self,
        request: LayerRequest,
        experts: tuple[int, ...],
        layout: StoredLayout,
        device: torch.device | str,
        projections: frozenset[str],
    ) -> None:
        """Nothing is allocated yet.

        Args:
            request: The layer.
            experts: Global ids, in the order of the local rows; one id may be there twice.
            layout: How the checkpoint orders gate and up.
            device: Where the tensors will lie.
            projections: Those to make, of `w13` and `w2`.
        """
        self._request, self._layout, self._device = request, layout, device
        self._expected = {
            name: expected
            for name, expected in expected_tensors(request, len(experts)).items()
            if any(name == bias_name(projection) or name.split("_")[0] == projection for projection in projections)
        }
        self._local: dict[int, list[int]] = {}
        for local, expert in enumerate(experts):
            self._local.setdefault(expert, []).append(local)
        self.order = {expert: rows[0] for expert, rows in self._local.items()}
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []

    def allocate(self, bias_dtypes: dict[str, set[torch.dtype]], without: Container[str] = ()) -> None:
        """Make the tensors: zeros, and ones for scales.

        Args:
            bias_dtypes: `b13` and `b2` -> dtypes in which they are stored; they keep theirs.
            without: Tensors that are not to be made.
        """
        for name, expected in self._expected.items():
            if name in without:
                continue
            stored = bias_dtypes.get(name, set())
            if stored - set(expected.dtypes):
                words = ", ".join(sorted(map(str, stored)))
                self.problems.append(f"{name}: stored as {words} in a layer of {self._request.dtype}")
            dtype = torch.float32 if torch.float32 in stored else expected.dtypes[0]
            tensor = torch.zeros(expected.shape, dtype=dtype, device=self._device)
            if name.endswith("_scale") and not name.endswith("_input_scale"):
                tensor.fill_(_EXPONENT_OF_ONE if dtype == torch.uint8 else 1)
            self.tensors[name] = tensor

    def put(self, values: Tensor, read: Read) -> None:
        """Write one piece, for every local row of its expert, or check what is not written."""
        try:
            _PUT[read.tensor.role](self, values, read)
        except WeightsError as error:
            self.problems.append(str(error))

    def _scheme(self, read: Read) -> QuantScheme:
        return read.part.storage.scheme

    def _write(self, name: str, read: Read, piece: Tensor, tile: int) -> None:
        first, step = (0, 1) if read.band is None else read.band.target
        for local in self._local[read.expert]:
            target = self.tensors[name][local]
            target = target[:, None] if target.dim() == 1 else target
            start = first // tile if tile > 1 else first
            rows = target[start : start + step * piece.shape[0] : step]
            rows[: piece.shape[0], : piece.shape[1]].copy_(piece)

    def _write_halves(self, name: str, read: Read, found: Tensor) -> None:
        """One value for each half of the part."""
        start = read.part.halves[0]
        for local in self._local[read.expert]:
            target = self.tensors[name][local]
            target = target[None] if target.dim() == 0 else target
            target[start : start + len(found)].copy_(found)

    def _put_weight(self, values: Tensor, read: Read) -> None:
        piece = pieces.weight(pieces.matrix(values, read), read, self._fill(read))
        self._write(read.part.projection, read, piece, 1)

    def _put_bias(self, values: Tensor, read: Read) -> None:
        self._write(bias_name(read.part.projection), read, _rows(pieces.matrix(values, read), read), 1)

    def _put_scale(self, values: Tensor, read: Read) -> None:
        name, dtype = f"{read.part.projection}_scale", self._scheme(read).weight_scale
        if not self._scheme(read).is_per_tensor:
            piece = pieces.scale(pieces.matrix(values, read), read, dtype)
            self._write(name, read, piece, read.shape.tile[0])
            return
        found = self._scalars(values, read)
        content.check_factors(found, values, read, may_be_zero=True)
        self._write_halves(name, read, pieces.scale_values(found, read.name, dtype))

    def _put_zero_point(self, values: Tensor, read: Read) -> None:
        name, whole = f"{read.part.projection}_zero_point", self._scheme(read).is_per_tensor
        piece = values if whole else pieces.zero_point(pieces.matrix(values, read), read)
        if self._scheme(read).zero_point is not True:
            content.check_zero_points(piece, read)
        elif whole:
            self._write_halves(name, read, self._scalars(values, read))
        else:
            self._write(name, read, piece, read.shape.tile[0])

    def _put_global_scale(self, values: Tensor, read: Read) -> None:
        found = self._scalars(values, read)
        content.check_factors(found, values, read, may_be_zero=False)
        self._write_halves(f"{read.part.projection}_global_scale", read, found)

    def _put_input_scale(self, values: Tensor, read: Read) -> None:
        found = self._scalars(values, read)
        content.check_factors(found, values, read, may_be_zero=False)
        # Tokens may be rounded before it is known which expert reads them; the largest scale saturates for none.
        target = self.tensors[f"{read.part.projection}_input_scale"]
        target.copy_(torch.maximum(target.cpu(), found.max()))

    def _scalars(self, values: Tensor, read: Read) -> Tensor:
        """One value for each half in canonical order; two stored ones are in the order of the stored rows."""
        found = pieces.scalars(values, read)
        return found.flip(0) if values.numel() == 2 and self._layout.rows == "up_gate" else found

    def _fill(self, read: Read) -> Tensor | None:
        """Codes that mean zero where a band is padded and zero codes do not."""
        band, columns = read.band, read.shape.taken_columns
        scheme = self._scheme(read)
        if band is None or scheme.zero_point is not True or not (band.rows.padding or columns.padding):
            return None
        tile_rows, tile_columns = read.shape.tile
        first, step = band.target
        points = self.tensors[f"{read.part.projection}_zero_point"][self._local[read.expert][0]].cpu()
        if scheme.is_per_tensor:
            times, alternate = tile_rows // len(points), self._request.activation.row_order == "interleaved"
            points, tile_rows = points.repeat(times) if alternate else points.repeat_interleave(times), 1
        points = points[:, None] if points.dim() == 1 else points
        spread = points.repeat_interleave(tile_rows, 0).repeat_interleave(tile_columns, 1)
        spread = spread[first : first + step * band.rows.size : step, : columns.size].contiguous()
        return spread.view(torch.uint8) & 15 if scheme.weight_bits == 4 else spread


def _rows(column: Tensor, read: Read) -> Tensor:
    return column if read.rows is None else read.rows.of(column, 0)


#: Role of a stored tensor -> what is done with it.
_PUT: dict[str, Callable[[Filler, Tensor, Read], None]] = {
    "weight": Filler._put_weight,
    "scale": Filler._put_scale,
    "zero_point": Filler._put_zero_point,
    "global_scale": Filler._put_global_scale,
    "input_scale": Filler._put_input_scale,
    "input_zero": lambda filler, values, read: content.check_offsets(values, read),
    "bias": Filler._put_bias,
    "zeros": lambda filler, values, read: content.check_offsets(values, read),
    "group_index": lambda filler, values, read: content.check_groups(values, read),
}
