"""What is quantized: a checkpoint of float weights, its configuration, and the files beside both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from moe_core.errors import SpecError, WeightsError
from moe_core.expert_names import is_of_experts
from moe_core.model_config import QUANT_FILES, quantization_of, read_config
from moe_core.payloads import TORCH_DTYPES
from moe_core.weights.checkpoint import Checkpoint

#: Ends of the names of matrices, packed ones last.
_WEIGHTS = (".weight", ".weight_packed", ".qweight")
_FILE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@attrs.frozen(eq=False, kw_only=True)
class Source:
    """An open checkpoint of float weights.

    Attributes:
        folder: Where it lies.
        config: Content of its `config.json`.
        checkpoint: Its tensors.
    """

    folder: Path
    config: dict[str, Any]
    checkpoint: Checkpoint

    @property
    def num_bytes(self) -> int:
        """Size of its weight files."""
        return sum(file.stat().st_size for file in self.checkpoint.files)

    def other_files(self) -> tuple[Path, ...]:
        """Files to copy: the tokenizer, generation settings, code, licence; no folders.

        Weights in any format, their indices and `config.json` are not among them.
        """
        return tuple(
            path
            for path in sorted(self.folder.iterdir())
            if path.is_file()
            and path.name != "config.json"
            and path.suffix not in _FILE_SUFFIXES
            and not path.name.endswith(".index.json")
        )


@contextlib.contextmanager
def open_source(folder: Path) -> Iterator[Source]:
    """Open the checkpoint in `folder` until the block ends.

    Raises:
        SpecError: It has no configuration, or is quantized already.
        WeightsError: It has no safetensors, they cannot be read, they differ from their index, or they hold weights
            that are no floats.
    """
    # The file itself: it is written again, without what else may describe the weights.
    config = read_config(folder / "config.json")
    _refuse_quantized(folder, config)
    with Checkpoint(folder) as checkpoint:
        # Every file is opened, so that a bad one is found before anything is written.
        _refuse_codes(folder, {name: checkpoint.dtype(name) for name in checkpoint.names})
        yield Source(folder=folder, config=config, checkpoint=checkpoint)


def _refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    says = quantization_of(config)
    # Tools append the type of quantization to the names.
    marks = tuple(Path(name).stem for name in QUANT_FILES)
    beside = [path.name for path in sorted(folder.glob("*.json")) if path.name.startswith(marks)]
    if says or beside:
        method = says.get("quant_method") if says else None
        where = f"its config.json says so{f', by {method!r}' if method else ''}" if says else f"it has {beside[0]}"
        raise SpecError(
            f"model {folder} is quantized already ({where}); quantize the float checkpoint it was made from"
        )


def _refuse_codes(folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
    """Weights outside the experts would be copied into a checkpoint that calls them floats."""
    names = sorted(name for name, dtype in dtypes.items() if name.endswith(_WEIGHTS) and not is_of_experts(name))
    codes = [f"{name}: {dtypes[name]}" for name in names if dtypes[name] not in (torch.float64, *TORCH_DTYPES.values())]
    if codes:
        title = (
            "weights that are no floats, and no configuration that says how they are quantized; nothing was written:"
        )
        raise WeightsError.listing(f"{folder}: {title}", codes)
