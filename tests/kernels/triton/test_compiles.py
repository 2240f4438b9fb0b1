"""Kernels compile for a GPU that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support"


def _output(script: str, *arguments: str, cache: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(SUPPORT), str(ROOT / "tests" / "acceptance"), os.environ.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, SUPPORT / script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    wanted = {"sort_pairwise", "grouped_gemm", "_combine", "_first_projection", "_second_projection", "_quantize_rows"}
    wanted |= {"count_blocks", "add_up_blocks", "place_blocks", "_copy_rows", "_row_experts", "_activate_rows"}
    wanted |= {"_rounded_rows", "_checked_ids", "_rows_in_planes"}
    wanted |= {"try_out", "send_tokens", "receive_ids", "return_sums", "add_sums"}
    assert set(_output("compile_kernels.py", "90", cache=tmp_path).split()) == wanted


def test_large_tiles_fit_into_hoppers_shared_memory(tmp_path: Path) -> None:
    lines = _output("compile_tiles.py", cache=tmp_path).splitlines()
    assert len(lines) > 5
    assert [line for line in lines if not line.startswith("fits:")] == []
