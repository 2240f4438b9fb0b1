"""Files that would be waited for are refused, wherever a file is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_core.environment import load_environment
from moe_core.errors import MoeCoreError
from moe_core.json_files import read_json
from moe_core.measurement_files import MeasurementFile
from moe_core.model_config import read_config
from moe_core.regular_file import read_regular
from moe_core.weights.checkpoint import SINGLE_FILE, Checkpoint

pytestmark = pytest.mark.error_path


@pytest.fixture(params=["pipe", "device", "folder"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "special"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


@pytest.mark.parametrize("read", [read_regular, read_json], ids=["text", "json"])
def test_what_is_no_regular_file_is_refused_as_one_that_cannot_be_read(read: Callable[[Path], object], special: Path):
    with pytest.raises(
        OSError, match="it is no regular file; what comes through a pipe or from a device has to be put"
    ):
        read(special)


def test_every_reader_of_files_refuses_it(special: Path) -> None:
    with pytest.raises(MoeCoreError, match="no regular file"):
        load_environment(str(special))
    with pytest.raises(MoeCoreError, match="no regular file"):
        MeasurementFile.read(special)
    model = special.parent / "model"
    model.mkdir()
    (model / "config.json").symlink_to(special)
    with pytest.raises(MoeCoreError, match="no regular file"):
        read_config(model)
    (model / SINGLE_FILE).symlink_to(special)
    with pytest.raises(MoeCoreError, match=r"no (regular|safetensors) file"), Checkpoint(model):
        pass


def test_links_to_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("héllo", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    assert read_regular(tmp_path / "link") == "héllo"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "absent")
