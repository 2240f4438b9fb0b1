"""The checkpoint that is written: shards of limited size in a folder that appears only when it is complete."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from safetensors.torch import save_file

from moe_core.errors import SpecError
from moe_core.payloads import Tensor
from moe_core.quant import StoredScheme

#: Bytes per weight file; a single larger tensor still makes one file.
SHARD_BYTES = 5_000_000_000


def require_new(out: Path) -> None:
    """Raise `SpecError` if `out` exists and is not an empty folder."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise SpecError(f"{out} exists and is not an empty folder; give a new one")


def stale_folders(out: Path) -> tuple[Path, ...]:
    """What runs that were killed left beside `out`; one that is still writing has such a folder, too."""
    beside = out.parent.iterdir() if out.parent.is_dir() else ()
    marks = (f".{out.name}.", ".partial")
    return tuple(sorted(path for path in beside if path.name.startswith(marks[0]) and path.name.endswith(marks[1])))


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` when the block ends, and vanishes if it fails.

    Folders above it that are not there are made, and vanish with it.

    Raises:
        SpecError: `out` exists and is not an empty folder.
    """
    require_new(out)
    # Innermost first.
    made = [folder for folder in out.parents if not folder.exists()]
    with contextlib.ExitStack() as failed:
        for folder in reversed(made):
            failed.callback(_remove_empty, folder)
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside it, so that the last step is a rename within one file system.
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        failed.callback(shutil.rmtree, partial, ignore_errors=True)
        yield partial
        # What makes temporary folders and weight files makes them for their owner alone.
        mask = _umask()
        for path in partial.iterdir():
            path.chmod(0o666 & ~mask)
        partial.chmod(0o777 & ~mask)
        partial.replace(out)
        failed.pop_all()


def _remove_empty(folder: Path) -> None:
    """Others may have put something there meanwhile."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One JSON document, indented as Hugging Face does."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@attrs.frozen(kw_only=True)
class WrittenCheckpoint:
    """What `quantize_checkpoint` wrote.

    Attributes:
        folder: Where.
        stored: The scheme of the experts and the word for their layout.
        num_experts: Experts of all layers together.
        expert_bytes_before: Their weights in the source.
        expert_bytes_after: Their codes and scales.
        kept_bytes: All other tensors, copied.
    """

    folder: Path
    stored: StoredScheme
    num_experts: int
    expert_bytes_before: int
    expert_bytes_after: int
    kept_bytes: int


class ShardWriter:
    """Collects tensors and writes a file whenever they fill one."""

    def __init__(self, folder: Path, stem: str, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._stem, self._shard_bytes = folder, stem, shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._written: list[tuple[Path, tuple[str, ...]]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it must not be changed afterwards."""
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._waiting[name] = tensor.contiguous()
        self._waiting_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def close(self) -> None:
        """Write what waits, give the files their final names, and write the index if there are several."""
        self._flush()
        count = len(self._written)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._written, start=1):
            file = f"{self._stem}-{number:05}-of-{count:05}.safetensors" if count > 1 else f"{self._stem}.safetensors"
            path.rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(self._folder / f"{self._stem}.safetensors.index.json", index)

    def _flush(self) -> None:
        path = self._folder / f"part-{len(self._written)}.safetensors"
        save_file(self._waiting, path, metadata={"format": "pt"})
        self._written.append((path, tuple(self._waiting)))
        self._waiting, self._waiting_bytes = {}, 0
