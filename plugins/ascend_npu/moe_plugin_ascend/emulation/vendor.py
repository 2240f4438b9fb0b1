"""The vendor's torch_npu, loaded on a machine without an NPU for its operator schemas and Meta kernels."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import io
import multiprocessing
import os
import sys
import warnings
from pathlib import Path

import torch

from moe_core.testing.vendor_folder import vendor_folder
from moe_plugin_ascend.emulation.stubs import FOLDER, LIBRARIES

#: Names the folder with torch_npu and its stand-ins; "" for none.
VARIABLE = "MOE_PLUGIN_ASCEND_VENDOR"
_INSTALL = (
    "pip install --no-deps --target {folder} torch_npu==VERSION, then python -m moe_plugin_ascend.emulation {folder}"
)


def find_vendor() -> str:
    """The version of the torch_npu that this process has or can load, "" if there is none.

    Looked for in the folder that the variable names, else in `ascend-vendor` of this Python environment; then not in
    ranks that tests start, which are daemons: each would take seconds to load it.

    Raises:
        FileNotFoundError: There is a folder without one that was made loadable.
        ImportError: It cannot be loaded.
    """
    loaded = sys.modules.get("torch_npu")
    if loaded is not None:
        return str(loaded.__version__)
    if VARIABLE not in os.environ and multiprocessing.current_process().daemon:
        return ""
    folder = vendor_folder(VARIABLE, "ascend-vendor", FOLDER, _INSTALL)
    return "" if folder is None else load_vendor(folder)


def load_vendor(folder: Path) -> str:
    """Import torch_npu from `folder` over its stand-ins; returns its version.

    The import leaves its mark on the environment variables and wants to be found on the path; both are as before
    afterwards, so that processes started from here do not load it by themselves.

    Raises:
        ImportError: It is for another torch, or cannot be loaded.
    """
    version = next(d.version for d in importlib.metadata.distributions(name="torch_npu", path=[str(folder)]))
    if version.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(f"torch_npu {version} in {folder} is for another torch than {torch.__version__}")
    variables, path = dict(os.environ), list(sys.path)
    try:
        # Set but without the files it promises, it makes the import fail.
        os.environ.pop("ASCEND_HOME_PATH", None)
        sys.path.insert(0, str(folder))
        for library in LIBRARIES:
            ctypes.CDLL(str(folder / FOLDER / f"lib{library}.so"), mode=ctypes.RTLD_GLOBAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            importlib.import_module("torch_npu")
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(variables)
    return version
