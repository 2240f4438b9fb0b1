"""A quantized model that several files load."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with fp8 experts; not to be changed."""
    from tests.integrations.hf_quantized import FP8, write_qwen

    folder = tmp_path_factory.mktemp("fp8")
    write_qwen(folder, FP8)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    shutil.copytree(written, tmp_path / "model")
    return tmp_path / "model"
