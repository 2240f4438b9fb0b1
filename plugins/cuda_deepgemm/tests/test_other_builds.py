"""Small layers over the Python of every build there is, each in a process of its own: all are called `deep_gemm`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_deep_gemm import VENDOR

BUILDS = Path(__file__).resolve().parents[3] / ".venv" / "deepgemm-vendor"
CODE = """
from deepgemm_layers import small_layer
from moe_core.quant import BF16, FP8_BLOCK128, FP8_BLOCK128_UE8M0
from moe_plugin_deepgemm.library import deep_gemm

for quant in (BF16, FP8_BLOCK128, FP8_BLOCK128_UE8M0):
    for format_ in ("contiguous", "masked"):
        error, allowed = small_layer(quant, format_).error()
        assert error < allowed, (quant, format_, error)
print(deep_gemm().__file__)
"""


@pytest.mark.parametrize("build", ["tokenspeed-deepgemm", "sgl-deep-gemm"])
def test_layers_over_a_build(build: str) -> None:
    site = BUILDS / build
    if not (site / "deep_gemm").is_dir():
        pytest.skip(f"no {build} here (make deepgemm-vendor)")
    environ = {**os.environ, VENDOR: str(site), "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run([sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert Path(finished.stdout.strip()).is_relative_to(site)
