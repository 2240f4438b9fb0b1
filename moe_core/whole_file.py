"""Files that are written whole or not at all, and where that can be known before minutes of work."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from moe_core.errors import SpecError, UnwrittenError

#: Bytes that a file system has to have free, at least.
_BLOCK = 4096


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file in one step: who reads it, or is interrupted, never sees half of it. A link stays a link.

    Raises:
        UnwrittenError: It cannot be written; what was there is unchanged.
    """
    target = _target(path)
    unfinished = _beside(target)
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, target)
    except OSError as error:
        raise UnwrittenError(f"{path}: cannot be written ({error})") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def check_writable(path: Path, what: str) -> None:
    """Raise `SpecError` unless `write_whole` can write there; nothing is left behind.

    Args:
        path: The file, in a folder that exists.
        what: What the message begins with.
    """
    target = _target(path)
    if os.path.lexists(target) and not target.is_file():
        # A device would be replaced by a file, and a pipe is waited for.
        raise SpecError(f"{what}: {path} is there and is no regular file")
    unfinished = _beside(target)
    try:
        # An empty file fits onto a full disk.
        unfinished.write_bytes(bytes(_BLOCK))
    except OSError as error:
        raise SpecError(f"{what}: no file can be made there ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _beside(target: Path) -> Path:
    """A name that no other process takes, on any machine that shares the folder."""
    return target.with_name(f".moe-core-{os.getpid()}-{secrets.token_hex(4)}")
