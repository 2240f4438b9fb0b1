"""A checkpoint on disk: which tensors it has, and slices of them, read when asked for and counted."""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from moe_core.errors import WeightsError, some_of
from moe_core.payloads import Tensor
from moe_core.regular_file import read_regular, require_regular

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

#: Words of the safetensors format -> torch's dtypes.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorSource(Protocol):
    """What the loader reads from: a checkpoint, or tensors in memory."""

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""

    def under(self, module: str) -> frozenset[str]:
        """Names of the tensors below one module."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype."""

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of it, one slice for each axis; the caller does not write to what it gets."""


class Checkpoint:
    """A folder of safetensors files, or one such file.

    The files are opened when a tensor in them is first asked for; only the slices asked for are copied out of them.

    Attributes:
        path: The folder or file.
        bytes_read: Bytes of all slices read so far.
    """

    def __init__(self, path: str | Path) -> None:
        """Find the files; a folder with `model.safetensors.index.json`, or one other such index, is sharded.

        Raises:
            WeightsError: No safetensors there, or several indexes; a shard is missing from the disk or from the index;
                the index or the header of a single file is not readable.
        """
        self.path = Path(path)
        self.bytes_read = 0
        self._open: dict[str, Any] = {}
        self._folder = self.path.parent if self.path.is_file() else self.path
        self._index = None if self.path.is_file() else _find_index(self.path)
        self._file_of = _read_index(self._index) if self._index else self._names_of_one_file()
        self._sorted = sorted(self._file_of)
        self._names_in: dict[str, set[str]] = {}
        for name, file in self._file_of.items():
            self._names_in.setdefault(file, set()).add(name)

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold them."""
        return tuple(self._folder / file for file in sorted(self._names_in))

    def under(self, module: str) -> frozenset[str]:
        """Names of the tensors below one module."""
        first = bisect.bisect_left(self._sorted, f"{module}.")
        # The character after the dot.
        return frozenset(self._sorted[first : bisect.bisect_left(self._sorted, f"{module}/")])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one tensor.

        Raises:
            WeightsError: A dtype that this project has no use for.
        """
        word = self._slice(name).get_dtype()
        if word not in _DTYPES:
            raise WeightsError(f"{self.path}: {name} has dtype {word}; known are {', '.join(_DTYPES)}")
        return _DTYPES[word]

    def nbytes(self, name: str) -> int:
        """Bytes of one tensor; errors as of `dtype`."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        """A part of one tensor; without `slices` all of it.

        Args:
            name: The tensor.
            slices: One for each axis, without steps.

        Raises:
            WeightsError: There is no such tensor, or the file cannot be read.
        """
        stored = self._slice(name)
        try:
            # The library would put it on the device that the caller has made the default.
            with torch.device("cpu"):
                values: Tensor = stored[slices or ...]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self._folder / self._file_of[name]}: {name} cannot be read ({error})") from error
        self.bytes_read += values.numel() * values.element_size()
        return values

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise WeightsError(f"{self.path}: no tensor {name}")
        return self._shard(self._file_of[name]).get_slice(name)

    def _shard(self, file: str) -> Any:
        """The open file, in which everything lies that the index says."""
        if file not in self._open:
            shard = _open_file(self._folder / file)
            named, held = self._names_in[file], set(shard.keys())
            if named != held:
                where = self._index or self._folder / file
                _refuse_index(where, file, absent=named - held, unnamed=held - named)
            self._open[file] = shard
        return self._open[file]

    def _names_of_one_file(self) -> dict[str, str]:
        file = self.path if self.path.is_file() else _only_file(self.path)
        return dict.fromkeys(_open_file(file).keys(), file.name)


class InMemory:
    """Tensors in memory as a source."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """Borrow `tensors`."""
        self._tensors = tensors

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def under(self, module: str) -> frozenset[str]:
        """Names of the tensors below one module; all of them below none."""
        return frozenset(name for name in self._tensors if not module or name.startswith(f"{module}."))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one tensor."""
        return self._tensors[name].dtype

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A view of a part of one tensor."""
        return self._tensors[name][slices]


def _open_file(path: Path) -> Any:
    try:
        require_regular(path)
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a whole safetensors file ({error}); fetch it again") from error


def _find_index(folder: Path) -> Path | None:
    """The index of the shards in `folder`; tools that name their files otherwise name it after them."""
    if (folder / INDEX_FILE).is_file():
        return folder / INDEX_FILE
    others = sorted(folder.glob("*.safetensors.index.json"))
    if len(others) > 1 and not (folder / SINGLE_FILE).is_file():
        listed = ", ".join(index.name for index in others)
        raise WeightsError(f"{folder}: several indexes ({listed}); expected one, or {INDEX_FILE}")
    return others[0] if len(others) == 1 else None


def _only_file(folder: Path) -> Path:
    """The one file of weights in a folder without an index."""
    files = sorted(folder.glob("*.safetensors"))
    if folder / SINGLE_FILE in files:
        return folder / SINGLE_FILE
    if len(files) != 1:
        found = f"{len(files)} safetensors files and no index" if files else "no safetensors file"
        raise WeightsError(f"{folder}: {found}; expected {SINGLE_FILE}, or shards with {INDEX_FILE}")
    return files[0]


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index says."""
    try:
        content = json.loads(read_regular(index))
        file_of = content["weight_map"]
        named = set(file_of.values())
        if not all(isinstance(file, str) for file in named):
            raise TypeError("files are named by strings")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index}: not readable as an index with a weight_map ({error!r})") from error
    on_disk = {file.name for file in index.parent.glob("*.safetensors")}
    absent = sorted(named - on_disk)
    if absent:
        raise WeightsError(f"{index}: shards that are not on disk: {some_of(absent)}; fetch the rest of the model")
    # Files of another series (a second format beside the shards) are nobody's business.
    series = {_series(file) for file in named} - {None}
    strangers = sorted(file for file in on_disk - named if _series(file) in series)
    if strangers:
        raise WeightsError(f"{index}: shards on disk that the index does not name: {some_of(strangers)}")
    return dict(file_of)


def _series(file: str) -> tuple[str, str] | None:
    """What the shards of one checkpoint share: `model` and `00007` of `model-00002-of-00007.safetensors`."""
    match = re.fullmatch(r"(.+)-\d+-of-(\d+)\.safetensors", file)
    return (match[1], match[2]) if match else None


def _refuse_index(index: Path, file: str, absent: set[str], unnamed: set[str]) -> None:
    problems = [f"{name}: in the index, not in the file" for name in sorted(absent)]
    problems += [f"{name}: in the file, not in the index" for name in sorted(unnamed)]
    raise WeightsError.listing(f"{index} and {file} disagree; nothing was loaded:", problems)
