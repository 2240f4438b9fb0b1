from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import attrs
import pytest
from fakes import CPU, dispatcher, expect, manager_of, plugin, runner

from moe_core.errors import SpecError, UnwrittenError
from moe_core.measurement_files import MeasurementFile
from moe_core.measurements import Time
from moe_core.tuning.cache import Recorder

MANAGER = manager_of(plugin(dispatchers=[dispatcher()], runners=[runner()]), plugin("other", runners=[runner()]))
A, B = "toy:toy.standard + toy:toy.standard", "toy:toy.standard + other:toy.standard"


def test_times_are_added_and_replaced_one_count_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    recorder = Recorder(path, CPU, MANAGER)
    recorder.add("shape", 1, {A: Time(10.0), B: Time(11.0)})
    recorder.add("shape", 4, {A: Time(20.0)})
    again = Recorder(path, CPU, MANAGER)
    expect(not again.replaced)
    again.add("shape", 1, {A: Time(9.0)})
    again.add("another", 1, {A: Time(5.0)})
    # What is not there any more at a count was not measured with the rest.
    assert MeasurementFile.read(path).times == {
        "shape": {A: {1: Time(9.0), 4: Time(20.0)}},
        "another": {A: {1: Time(5.0)}},
    }
    assert again.num_times == 3


def test_times_of_a_wrong_result_are_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    Recorder(path, CPU, MANAGER).add("shape", 1, {A: Time(9.0), B: Time(12.0)})
    recorder = Recorder(path, CPU, MANAGER)
    recorder.add("another", 1, {B: Time(11.0)})
    recorder.add("shape", 2, {A: Time(10.0), B: Time(11.0)})
    recorder.add("shape", 4, {A: Time(20.0)}, wrong=[B])
    recorder.add("shape", 8, {A: Time(30.0)})
    kept = {A: {1: Time(9.0), 2: Time(10.0), 4: Time(20.0), 8: Time(30.0)}}
    assert MeasurementFile.read(path).times == {"another": {B: {1: Time(11.0)}}, "shape": kept}
    recorder.add("another", 1, {}, wrong=[B])
    assert MeasurementFile.read(path).times == {"shape": kept}


def test_nothing_is_written_where_there_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    Recorder(path, CPU, MANAGER).add("shape", 1, {}, wrong=[A])
    assert not path.exists()


def test_two_processes_keep_each_others_times(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    one, other = (Recorder(path, CPU, MANAGER) for _ in range(2))
    one.add("one", 1, {A: Time(10.0)})
    other.add("other", 1, {A: Time(20.0)})
    one.add("one", 4, {A: Time(30.0)})
    assert MeasurementFile.read(path).times == {
        "one": {A: {1: Time(10.0), 4: Time(30.0)}},
        "other": {A: {1: Time(20.0)}},
    }
    # Written over by one that had read it before: every run brings all of its own again.
    path.unlink()
    one.add("one", 8, {A: Time(40.0)})
    assert MeasurementFile.read(path).times == {"one": {A: {1: Time(10.0), 4: Time(30.0), 8: Time(40.0)}}}


def test_another_run_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    Recorder(path, CPU, MANAGER).add("shape", 1, {A: Time(10.0)})
    one, other = (Recorder(path, CPU, MANAGER) for _ in range(2))
    for count in (2, 4):
        one.add("shape", count, {A: Time(10.0)})
    assert not one.is_shared
    other.add("shape", 8, {A: Time(10.0)})
    one.add("shape", 16, {A: Time(10.0)})
    assert other.is_shared
    assert one.is_shared
    assert MeasurementFile.read(path).num_times == 5


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks")
def test_nobody_writes_between_a_look_and_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    path, tries = tmp_path / "times.json", []
    recorder = Recorder(path, CPU, MANAGER)
    held = os.open(tmp_path, os.O_RDONLY)

    def wait(seconds: float) -> None:
        tries.append(path.exists())
        if len(tries) == 2:
            os.close(held)

    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", wait)
    recorder.add("shape", 1, {A: Time(10.0)})
    assert tries == [False, False]
    assert MeasurementFile.read(path).num_times == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks")
def test_a_lock_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    Recorder(tmp_path / "times.json", CPU, MANAGER).add("shape", 1, {A: Time(10.0)})
    os.close(held)
    assert MeasurementFile.read(tmp_path / "times.json").num_times == 1


def test_bounds_of_the_samples_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    Recorder(path, CPU, MANAGER).add("shape", 1, {A: Time(10.0, (9.5, 11.0)), B: Time(12.0)})
    Recorder(path, CPU, MANAGER).add("shape", 4, {A: Time(20.0, (20.0, 20.0))})
    assert MeasurementFile.read(path).times == {
        "shape": {A: {1: Time(10.0, (9.5, 11.0)), 4: Time(20.0, (20.0, 20.0))}, B: {1: Time(12.0)}}
    }


def test_only_plugins_with_times_are_named(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    recorder = Recorder(path, CPU, MANAGER)
    recorder.add("shape", 1, {A: Time(10.0)})
    assert set(MeasurementFile.read(path).plugins) == {"toy"}
    recorder.add("shape", 4, {B: Time(10.0)})
    assert set(MeasurementFile.read(path).plugins) == {"toy", "other"}


@pytest.mark.error_path
def test_times_of_another_machine_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    Recorder(path, attrs.evolve(CPU, packages={"torch": "2.10.0"}), MANAGER).add("old", 1, {A: Time(1.0)})
    recorder = Recorder(path, CPU, MANAGER)
    expect("torch 2.10.0 there, 2.13.0 here" in recorder.replaced, recorder.replaced)
    recorder.add("new", 1, {A: Time(1.0)})
    expect(set(MeasurementFile.read(path).times) == {"new"})


@pytest.mark.error_path
def test_a_broken_file_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text("{")
    recorder = Recorder(path, CPU, MANAGER)
    expect("cannot be read" in recorder.replaced, recorder.replaced)
    expect(path.read_text() == "{", "nothing is written before there is something to write")
    recorder.add("new", 1, {A: Time(1.0)})
    expect(recorder.aside.read_text() == "{" and recorder.aside.name == "times.old.json", recorder.aside)
    recorder.add("new", 2, {A: Time(1.0)})
    expect(recorder.aside.read_text() == "{", "what counts is not put aside")
    expect(MeasurementFile.read(path).num_times == 2)


@pytest.mark.error_path
def test_what_a_run_of_another_version_writes_meanwhile_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    older = attrs.evolve(CPU, packages={"torch": "2.10.0"})
    one, other = Recorder(path, CPU, MANAGER), Recorder(path, older, MANAGER)
    one.add("one", 1, {A: Time(1.0)})
    other.add("other", 1, {A: Time(2.0)})
    expect(set(MeasurementFile.read(other.aside).times) == {"one"})
    one.add("one", 2, {A: Time(3.0)})
    expect(set(MeasurementFile.read(one.aside).times) == {"other"})
    expect(MeasurementFile.read(path).times == {"one": {A: {1: Time(1.0), 2: Time(3.0)}}})


@pytest.mark.error_path
def test_what_cannot_be_put_aside_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text("{")
    recorder = Recorder(path, CPU, MANAGER)
    recorder.aside.mkdir()
    recorder.add("new", 1, {A: Time(1.0)})
    expect(MeasurementFile.read(path).num_times == 1)


@pytest.mark.error_path
def test_times_of_another_version_of_a_plugin_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    Recorder(path, CPU, MANAGER).add("shape", 1, {A: Time(1.0), B: Time(2.0)})
    found = MeasurementFile.read(path)
    attrs.evolve(found, plugins={**found.plugins, "other": "other 0.9"}).write(path)
    recorder = Recorder(path, CPU, MANAGER)
    expect("times of other versions of other (other 0.9 there" in recorder.replaced, recorder.replaced)
    expect(recorder.num_times == 1)


@pytest.mark.error_path
def test_a_folder_that_is_gone_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    recorder = Recorder(folder / "times.json", CPU, MANAGER)
    recorder.add("shape", 1, {A: Time(1.0)})
    shutil.rmtree(folder)
    recorder.add("shape", 2, {A: Time(2.0)})
    expect(MeasurementFile.read(recorder.path).times == {"shape": {A: {1: Time(1.0), 2: Time(2.0)}}})
    shutil.rmtree(folder)
    folder.write_text("")
    with pytest.raises(UnwrittenError, match=r"times\.json: cannot be written"):
        recorder.add("shape", 4, {A: Time(4.0)})


@pytest.mark.error_path
def test_a_disk_that_fills_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "times.json"
    recorder = Recorder(path, CPU, MANAGER)
    recorder.add("shape", 1, {A: Time(1.0)})

    def refuse(*arguments: object, **options: object) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(UnwrittenError, match=r"times.json: cannot be written \(No space left on device\)"):
        recorder.add("shape", 2, {A: Time(1.0)})
    monkeypatch.undo()
    expect(MeasurementFile.read(path).times == {"shape": {A: {1: Time(1.0)}}})


@pytest.mark.error_path
def test_a_place_where_nothing_can_be_written_is_refused_at_once(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, blocked / "times.json", pipe):
        with pytest.raises(SpecError, match=r"times cannot be written to .* say --output FILE"):
            Recorder(path, CPU, MANAGER)
