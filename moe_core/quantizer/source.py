"""The checkpoint that is read: its tensors by name, one at a time; its files are mapped and never loaded whole."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import safetensors

from moe_core.errors import SpecError, WeightsError
from moe_core.model_config import read_config
from moe_core.payloads import Tensor

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: Files by which an ecosystem marks a quantized checkpoint, besides `config.json`.
_MARKS = ("quant_model_description", "hf_quant_config")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
#: Element types that can be quantized, as safetensors spells them.
FLOATS = ("F32", "BF16", "F16")


@attrs.frozen(eq=False, kw_only=True)
class SourceTensor:
    """One tensor that has not been read yet.

    Attributes:
        name: As in the checkpoint.
        shape: Of the whole tensor.
        dtype: As safetensors spells it, for example `BF16`.
        file: Name of the file that holds it.
        handle: The open file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    handle: Any

    @property
    def is_float(self) -> bool:
        """Whether it holds fp32, bf16 or fp16."""
        return self.dtype in FLOATS

    def read(self, *index: int | slice) -> Tensor:
        """The tensor, or the part at `index`, in memory of its own."""
        try:
            part: Tensor = self.handle.get_slice(self.name)[index] if index else self.handle.get_tensor(self.name)
        except safetensors.SafetensorError as error:
            raise WeightsError(f"{self.file}: tensor {self.name} cannot be read: {error}") from error
        return part


@attrs.frozen(eq=False, kw_only=True)
class Source:
    """An open checkpoint of float weights.

    Attributes:
        folder: Where it lies.
        config: Content of its `config.json`.
        tensors: Name -> tensor, in the order of the files.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, SourceTensor]

    @property
    def num_bytes(self) -> int:
        """Size of its weight files."""
        return sum((self.folder / file).stat().st_size for file in {tensor.file for tensor in self.tensors.values()})

    def other_files(self) -> tuple[Path, ...]:
        """Files to copy: the tokenizer, generation settings, code, licence, but no weights and not `config.json`."""
        return tuple(
            path
            for path in sorted(self.folder.iterdir())
            if path.is_file()
            and path.name != "config.json"
            and path.suffix not in _WEIGHT_SUFFIXES
            and not path.name.endswith(".index.json")
        )


@contextlib.contextmanager
def open_source(folder: Path) -> Iterator[Source]:
    """Open the checkpoint in `folder` until the block ends.

    Raises:
        SpecError: No checkpoint lies there, or it is quantized already.
        WeightsError: Its files cannot be read, or differ from its index.
    """
    # The file itself: it is written again, without what else may describe the weights.
    config = read_config(folder / "config.json")
    _refuse_quantized(folder, config)
    with contextlib.ExitStack() as stack:
        tensors: dict[str, SourceTensor] = {}
        files, listed = _weight_files(folder)
        for file in files:
            try:
                handle = stack.enter_context(safetensors.safe_open(folder / file, framework="pt"))
            except (OSError, safetensors.SafetensorError) as error:
                raise WeightsError(f"{folder / file}: not readable as safetensors: {error}") from error
            for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                part = handle.get_slice(name)
                tensors[name] = SourceTensor(
                    name=name, shape=tuple(part.get_shape()), dtype=part.get_dtype(), file=file, handle=handle
                )
        missing = sorted(listed - set(tensors))
        if missing:
            raise WeightsError(f"{folder / INDEX}: lists tensors that no file holds: {', '.join(missing[:8])}")
        yield Source(folder=folder, config=config, tensors=tensors)


def _refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    methods = [str(part["quantization_config"]) for part in parts if part.get("quantization_config")]
    marks = [path.name for path in folder.glob("*.json") if path.name.startswith(_MARKS)]
    if methods or marks:
        where = f"its config.json has {methods[0]:.80}" if methods else f"it has {marks[0]}"
        raise SpecError(
            f"model {folder} is quantized already ({where}); quantize the float checkpoint it was made from"
        )


def _weight_files(folder: Path) -> tuple[list[str], set[str]]:
    """Names of the weight files, and the tensors that an index says they hold."""
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return sorted(set(weight_map.values())), set(weight_map)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index}: not readable as an index of safetensors files: {error!r}") from error
    if (folder / _SINGLE).is_file():
        return [_SINGLE], set()
    raise SpecError(f"model {folder}: expected {INDEX} or {_SINGLE}; only safetensors checkpoints are read")
