"""The vendors' Python over compiled layers in torch, for this process and those that tests start."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

# Here and not in the project's settings, which hold for the tests of the core too.
sys.path.insert(0, str(Path(__file__).parent / "support"))

import emulated_deep_ep
import emulated_deep_gemm
import pytest
from emulated_deep_gemm import VENDOR

#: Where `make deepgemm-vendor` unpacks the wheels.
BUILDS = Path(__file__).resolve().parents[3] / ".venv" / "deepgemm-vendor"


def pytest_configure(config: pytest.Config) -> None:
    """A compiler to be found, and the wheel if there is one."""
    toolkit = Path(tempfile.mkdtemp(prefix="toolkit-"))
    (toolkit / "bin").mkdir()
    (toolkit / "bin" / "nvcc").touch()
    os.environ["CUDA_HOME"] = str(toolkit)
    site = Path(os.environ.get(VENDOR, BUILDS / "tokenspeed-deepgemm"))
    os.environ[VENDOR] = str(site) if (site / "deep_gemm").is_dir() else ""
    site = Path(os.environ.get(emulated_deep_ep.VENDOR, BUILDS / "tokenspeed-deepep"))
    os.environ[emulated_deep_ep.VENDOR] = str(site) if (site / "deep_ep").is_dir() else ""


def pytest_report_header() -> list[str]:
    """Whose signatures judge the plugin's calls in this run."""
    libraries = {VENDOR: emulated_deep_gemm.install(), emulated_deep_ep.VENDOR: emulated_deep_ep.install()}
    return [
        f"{library.__name__}: the vendor's Python over a compiled layer in torch"
        if os.environ[variable]
        else f"{library.__name__}: a stand-in, no vendor's signatures (make deepgemm-vendor)"
        for variable, library in libraries.items()
    ]


@pytest.fixture(scope="session")
def vendor() -> object:
    """The vendor's package."""
    if not os.environ[VENDOR]:
        pytest.skip("no deep_gemm here, whose signatures could be asked (make deepgemm-vendor)")
    return emulated_deep_gemm.install()


@pytest.fixture(scope="session")
def deep_ep_vendor() -> object:
    """The vendor's package of DeepEP."""
    if not os.environ[emulated_deep_ep.VENDOR]:
        pytest.skip("no deep_ep here, whose signatures could be asked (make deepgemm-vendor)")
    return emulated_deep_ep.install()
