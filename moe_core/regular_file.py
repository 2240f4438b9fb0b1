"""Files that are read as a whole: a pipe may have no writer and a device no end, so that neither is waited for."""

from __future__ import annotations

import errno
from pathlib import Path

_NO_FILE = "it is no regular file; what comes through a pipe or from a device has to be put into a file first"


def read_regular(path: Path, encoding: str = "utf-8") -> str:
    """The text of a regular file, or of what a link to one names.

    Raises:
        OSError: As of `require_regular`, or it cannot be read.
        UnicodeDecodeError: It is in another encoding.
    """
    require_regular(path)
    return path.read_text(encoding=encoding)


def require_regular(path: Path) -> None:
    """Raise `OSError` for a folder, pipe, socket or device; what is not there is left to who opens it."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, _NO_FILE, str(path))
