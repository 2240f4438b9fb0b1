"""Where a vendor's own package lies beside an emulation of it: in a folder of its own, since it fits no environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def vendor_folder(variable: str, default: str, holds: str, install: str) -> Path | None:
    """The folder that the variable names, else `default` in this Python environment; None to do without.

    Without is an empty variable, or no variable and no such folder.

    Args:
        variable: Environment variable with the folder's path.
        default: Name of a folder.
        holds: Name of a folder in it, without which it is of no use.
        install: What to type to fill the folder, with `{folder}` in its place.

    Raises:
        FileNotFoundError: The folder lacks it.
    """
    named = os.environ.get(variable)
    folder = Path(sys.prefix, default) if named is None else Path(named)
    if named == "" or (named is None and not folder.is_dir()):
        return None
    if not (folder / holds).is_dir():
        raise FileNotFoundError(
            f"{folder} holds no {holds}; {install.format(folder=folder)}, or set {variable}= to do without"
        )
    return folder
