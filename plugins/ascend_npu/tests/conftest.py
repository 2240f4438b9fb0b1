from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from moe_plugin_ascend.emulation import Emulation, install
from moe_plugin_ascend.emulation.vendor import VARIABLE

# Here and not in the project's settings, which hold for the tests of the core too.
sys.path.insert(0, str(Path(__file__).parent / "support"))


def pytest_configure(config: pytest.Config) -> None:
    """Load the vendor's package in the process that runs tests, and in none that a test starts: it takes seconds."""
    hands_out_tests = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out_tests:
        install()
        os.environ[VARIABLE] = ""


def pytest_report_header() -> str:
    """Which schemas judge the plugin's calls in this run."""
    return f"operators of Ascend: {install()}"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def emulation() -> Emulation:
    """The registered kernels."""
    return install()


@pytest.fixture(scope="session")
def vendor(emulation: Emulation) -> Emulation:
    """The same, where the vendor's own torch_npu stands behind it."""
    if not emulation.torch_npu:
        pytest.skip("no torch_npu here, whose schemas and Meta kernels could be asked (make ascend-vendor)")
    return emulation
