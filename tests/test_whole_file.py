from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fakes import expect

from moe_core.errors import SpecError, UnwrittenError
from moe_core.whole_file import check_writable, write_whole


def test_a_file_is_replaced_and_a_link_stays_one(tmp_path: Path) -> None:
    there, link = tmp_path / "there", tmp_path / "link"
    there.write_text("old")
    link.symlink_to(there)
    check_writable(link, "here")
    assert there.read_text() == "old"
    write_whole(link, "n\u00e9w")
    assert link.is_symlink()
    assert there.read_text(encoding="utf-8") == "n\u00e9w"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


@pytest.mark.error_path
def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "there"
    path.write_text("old")

    def interrupted(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    monkeypatch.undo()
    expect(path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1, list(tmp_path.iterdir()))
    with pytest.raises(UnwrittenError, match="gone/file: cannot be written"):
        write_whole(tmp_path / "gone" / "file", "new")


@pytest.mark.error_path
def test_a_disk_on_which_only_empty_files_fit_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, data: bytes) -> int:
        self.touch()
        if data:
            raise OSError(errno.ENOSPC, "No space left on device")
        return 0

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(SpecError, match=r"here: no file can be made there \(No space left on device\)"):
        check_writable(tmp_path / "file", "here")
    expect(not list(tmp_path.iterdir()))


@pytest.mark.error_path
def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "loop", "."):
        with pytest.raises(SpecError, match=r"--output: .* is no regular file"):
            check_writable(tmp_path / name, "--output")
    for place in (tmp_path / "gone" / "file", tmp_path / ("x" * 300) / "file"):
        with pytest.raises(SpecError, match="no file can be made there"):
            check_writable(place, "--output")
