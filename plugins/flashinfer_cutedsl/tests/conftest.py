from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from moe_plugin_flashinfer import emulation
from moe_plugin_flashinfer.emulation.signatures import RELEASES

# Here and not in the project's settings, which hold for the tests of the core too.
sys.path.insert(0, str(Path(__file__).parent / "support"))
# DeepEP comes from another plugin, and so does what stands for it where there is none. Behind everything else.
sys.path.append(str(Path(__file__).resolve().parents[2] / "cuda_deepgemm" / "tests" / "support"))


def pytest_report_header() -> str:
    """Whose signatures judge the plugin's calls in this run."""
    sources = " and ".join(emulation.source(release) for release in RELEASES)
    return f"flashinfer: emulated, calls are judged by {sources}"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
