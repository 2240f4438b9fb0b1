"""The canonical tensors of one rank, filled piece by piece."""

from __future__ import annotations

from collections.abc import Container

import torch

from moe_core.errors import WeightsError
from moe_core.payloads import Tensor
from moe_core.quant import QuantScheme
from moe_core.request import LayerRequest
from moe_core.weights import pieces
from moe_core.weights.bands import StoredLayout
from moe_core.weights.expected import expected_tensors
from moe_core.weights.reads import Read, is_per_tensor
from moe_core.weights.storages import bits_of

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

        Raises:
            WeightsError: The sizes cannot be stored in the scheme (an odd width of 4-bit values).
        """
        self._request, self._layout, self._device = request, layout, device
        self._expected = {
            name: expected
            for name, expected in expected_tensors(request, len(experts)).items()
            if f"w{name.partition('_')[0][1:]}" in projections
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
            if name.endswith("_scale"):
                tensor.fill_(_EXPONENT_OF_ONE if dtype == torch.uint8 else 1)
            self.tensors[name] = tensor

    def put(self, values: Tensor, read: Read) -> None:
        """Write one piece, for every local row of its expert."""
        role, projection = read.tensor.role, read.part.projection
        try:
            if role in ("global_scale", "input_scale") or is_per_tensor(read):
                self._put_scalars(values, read)
            elif role == "group_index":
                self._check_groups(values, read)
            elif role == "bias":
                name = f"b{projection[1:]}"
                self._write(name, read, _rows(pieces.matrix(values, read), read), 1)
            elif role == "weight":
                piece = pieces.weight(pieces.matrix(values, read), read, self._fill(read))
                self._write(projection, read, piece, 1)
            elif role == "scale":
                dtype = self._scheme(read).weight_scale
                piece = pieces.scale(pieces.matrix(values, read), read, dtype)
                self._write(f"{projection}_scale", read, piece, read.shape.tile[0])
            else:
                self._put_zeros(values, read)
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

    def _put_zeros(self, values: Tensor, read: Read) -> None:
        """Zero points; offsets, and zero points of schemes without, must say zero."""
        role, projection = read.tensor.role, read.part.projection
        if role == "zero_point":
            piece = pieces.zero_point(pieces.matrix(values, read), read)
            if self._scheme(read).zero_point is True:
                self._write(f"{projection}_zero_point", read, piece, read.shape.tile[0])
            elif bool((piece != 0).any()):
                other = "; a storage of the other GPTQ format?" if bool((piece.abs() == 1).all()) else ""
                raise WeightsError(f"{read.name}: the scheme has no zero points, these are not all zero{other}")
        elif bool((values != 0).any()):
            raise WeightsError(f"{read.name}: offsets that are not zero are not read by any scheme")

    def _check_groups(self, values: Tensor, read: Read) -> None:
        group = read.shape.block[1]
        wanted = torch.arange(read.shape.columns) // group
        if not torch.equal(values.flatten().long(), wanted):
            raise WeightsError(
                f"{read.name}: the groups follow the order of activations (act-order, desc_act): input channels of one "
                "group are not neighbours; such weights are not read. Quantize without act-order"
            )

    def _put_scalars(self, values: Tensor, read: Read) -> None:
        name, role, part = f"{read.part.projection}_{read.tensor.role}", read.tensor.role, read.part
        found = pieces.scalars(values, read)
        if values.numel() == 2 and self._layout.rows == "up_gate":
            found = found.flip(0)
        # The scale of a matrix of zeros may be zero; calibrated scales would make their experts zeros or NaN.
        fine = found.isfinite() & ((found > 0) if role != "scale" else (found >= 0))
        if not bool(fine.all()):
            stored = ", ".join(f"{value:g}" for value in values.double().flatten().tolist())
            raise WeightsError(f"{read.name}: expert {read.expert} has {stored}; expected finite numbers above zero")
        for local in self._local[read.expert]:
            target = self.tensors[name][local]
            if role == "input_scale":
                # Both halves read the same tokens; the larger scale saturates neither.
                first = part.halves[0] == 0
                target.copy_(found.max() if first else torch.maximum(target.cpu(), found.max()))
            elif target.dim() == 0:
                target.copy_(found[0])
            else:
                start = part.halves[0]
                scheme = self._scheme(read)
                scaled = found if role == "global_scale" else pieces.scale_values(found, read.name, scheme.weight_scale)
                target[start : start + len(scaled)].copy_(scaled)

    def _fill(self, read: Read) -> Tensor | None:
        """Codes that mean zero where a band is padded and zero codes do not."""
        band, columns = read.band, read.shape.taken_columns
        scheme = self._scheme(read)
        if band is None or scheme.zero_point is not True or not (band.rows.padding or columns.padding):
            return None
        tile_rows, tile_columns = read.shape.tile
        first, step = band.target
        points = self.tensors[f"{read.part.projection}_zero_point"][self._local[read.expert][0]].cpu()
        points = points[:, None] if points.dim() == 1 else points
        spread = points.repeat_interleave(tile_rows, 0).repeat_interleave(tile_columns, 1)
        spread = spread[first : first + step * band.rows.size : step, : columns.size].contiguous()
        return spread.view(torch.uint8) & 15 if bits_of(scheme) == 4 else spread


def _rows(column: Tensor, read: Read) -> Tensor:
    return column if read.rows is None else read.rows.of(column, 0)
