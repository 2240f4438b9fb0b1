from __future__ import annotations

import json
import os
import pwd
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import attrs
import pytest
from fakes import expect

from moe_core import measurement_sources
from moe_core.environment import PRESETS, Environment
from moe_core.errors import SpecError
from moe_core.measurement_files import MeasurementFile, is_of_card
from moe_core.measurement_sources import (
    MeasurementWarning,
    default_measurements,
    explicit_measurements,
    older_file,
    user_file,
)
from moe_core.measurements import Measurement, Time

HERE = Environment(
    device_type="cuda",
    arch="sm90",
    device_name="NVIDIA H100 80GB HBM3",
    driver="CUDA 13.0",
    packages={"torch": "2.11.0", "triton": "3.6.0"},
)
VERSIONS = {"torch": "moe-core 0.1.0", "vendor": "moe-plugin-vendor 1.0"}
TORCH, VENDOR = "torch:none.standard + torch:torch.standard", "torch:none.masked + vendor:gemm.masked"
FILE = MeasurementFile(
    environment=HERE,
    plugins=VERSIONS,
    date="2026-11-28",
    times={
        "shape a": {TORCH: {1: Time(12.5), 16: Time(40.0, (38.5, 41.0))}, VENDOR: {16: Time(30.0)}},
        "shape b": {TORCH: {1: Time(3.0)}},
    },
)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the tables that ship."""
    folder = tmp_path / "tables"
    folder.mkdir()
    monkeypatch.setattr(measurement_sources, "SHIPPED", folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped: Path) -> Path:
    """Where the user's file of `HERE` would be; there is none yet, and no table ships."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return user_file(HERE)


def _shipped_rows() -> set[Measurement]:
    return set(FILE.table("shipped h100").rows)


def _data(**changes: Any) -> str:
    return json.dumps(json.loads(FILE.to_text()) | changes)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "times.json"
    FILE.write(path)
    assert MeasurementFile.read(path) == FILE
    assert [found.name for found in path.parent.iterdir()] == ["times.json"]
    assert FILE.num_times == 4


def test_a_file_with_a_mark_of_the_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(FILE.to_text(), encoding="utf-8-sig")
    assert MeasurementFile.read(path) == FILE


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "times.json"
    FILE.write(path)

    def fail(*arguments: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        attrs.evolve(FILE, times={}).write(path)
    assert MeasurementFile.read(path) == FILE
    assert len(list(tmp_path.iterdir())) == 1


def test_rows_say_where_they_are_from() -> None:
    table = FILE.table("shipped h100")
    assert {row.source for row in table.rows} == {"shipped h100, NVIDIA H100 80GB HBM3, 2026-11-28"}
    assert {row.arch for row in table.rows} == {"sm90"}
    assert table.origins == (
        "shipped h100: 4 times of 2 shapes, NVIDIA H100 80GB HBM3, torch 2.11.0, triton 3.6.0, 2026-11-28",
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [("NVIDIA H100", True), ("NVIDIA H100 80GB HBM3", True), ("NVIDIA H100 PCIe", False), ("NVIDIA H10", False)],
)
def test_the_card_of_a_table(name: str, found: bool) -> None:
    assert is_of_card(HERE, attrs.evolve(HERE, device_name=name, packages={}, driver="")) is found


@pytest.mark.parametrize("change", [{"device_name": ""}, {"arch": "sm100"}, {"device_type": "xpu", "arch": ""}])
def test_another_card(change: dict[str, Any]) -> None:
    assert not is_of_card(HERE, attrs.evolve(HERE, **change))


def test_the_users_file_is_below_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "moe-core" / "measurements"
    assert user_file(HERE) == folder / "cuda-sm90-nvidia-h100-80gb-hbm3.json"
    assert user_file(PRESETS["cpu"]) == folder / "cpu-generic-cpu.json"


@pytest.mark.parametrize("given", ["", "relative", None])
def test_a_home_that_is_no_folder_is_that_of_the_system(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME") if given is None else monkeypatch.setenv("HOME", given)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: SimpleNamespace(pw_dir=f"/home/of-{number}"))
    assert user_file(HERE).is_relative_to(f"/home/of-{os.getuid()}/.cache/moe-core")


def test_nothing_measured_is_nothing(cache: Path) -> None:
    assert default_measurements(HERE, VERSIONS).rows == ()
    assert default_measurements(HERE, VERSIONS).origins == ("none for this machine; moe-core tune makes them",)


def test_a_shipped_table_serves_its_card_whatever_the_versions(cache: Path, shipped: Path) -> None:
    FILE.write(shipped / "h100.json")
    assert set(default_measurements(PRESETS["h100"], {"torch": "moe-core 9"}).rows) == _shipped_rows()
    assert default_measurements(PRESETS["h200"], VERSIONS).rows == ()


def test_the_users_times_are_above_the_shipped_ones(cache: Path, shipped: Path) -> None:
    FILE.write(shipped / "h100.json")
    own = attrs.evolve(FILE, times={"shape a": {TORCH: {1: Time(99.0)}}})
    own.write(cache)
    table = default_measurements(HERE, VERSIONS)
    assert [(row.shape, row.microseconds) for row in table.rows] == [("shape a", 99.0), ("shape b", 3.0)]
    assert [line.partition(":")[0] for line in table.origins] == ["your cache", "shipped h100"]


def test_a_file_is_read_again_when_it_has_changed(cache: Path) -> None:
    FILE.write(cache)
    assert len(default_measurements(HERE, VERSIONS).rows) == 4
    attrs.evolve(FILE, times={}).write(cache)
    assert default_measurements(HERE, VERSIONS).rows == ()


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read as the JSON of moe-core tune (Expecting value"),
        ("\x00", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"schema": 1, "schema": 2}', "names the key 'schema' twice"),
        (_data().replace('"times": {', '"times": {"shape a": {}, "shape a": {}, ', 1), "names the key 'shape a' twice"),
        (_data(environment=[]), "expected an object, got a list"),
        ("[]", "the document: expected an object, got a list"),
        (_data(schema=0), "expected schema 1, got 0; run moe-core tune again"),
        (_data(schema=2), "expected schema 1, got 2"),
        (_data(schema=True), "expected schema 1, got true"),
        (_data(schema=1.0), "expected schema 1, got 1.0"),
        (_data(date=["2026-11-28"]), "date: expected a text, got a list"),
        (_data(plugins=[]), "plugins: expected an object, got a list"),
        (_data(plugins={"torch": 1}), "plugins.torch: expected a text, got 1"),
        (_data(plugins={"torch": "\x1b[31m"}), "plugins.torch: expected a printable text"),
        (_data(times={"E8 K2": {TORCH: {"1": -1}}}), f'times["E8 K2"]["{TORCH}"]["1"]: expected a number > 0, got -1'),
        (_data(times={"a": {TORCH: {"1": True}}}), "expected a number > 0, got true"),
        (_data(times={"a": {TORCH: {"1": float("nan")}}}), "expected a number > 0, got NaN"),
        (_data(times={"a": {TORCH: {"1": 10**400}}}), "expected a number > 0, got 1000"),
        (_data(times={"a": {TORCH: {"1": [1, 2]}}}), "expected [median, low bound, high bound], got"),
        (_data(times={"a": {TORCH: {"1": [2, 3, 1]}}}), "got [2.0, 3.0, 1.0]"),
        (_data(times={"a": {TORCH: {"1": [4, 1, 3]}}}), "got [4.0, 1.0, 3.0]"),
        (_data(times={"a": {TORCH: {"1": [1, 2, 3]}}}), "got [1.0, 2.0, 3.0]"),
        (_data(times={"a": {TORCH: {"1": [2, 0, 3]}}}), f'times.a["{TORCH}"]["1"][1]: expected a number > 0, got 0'),
        (_data(times={"a": {TORCH: {"zero": 1}}}), f'times.a["{TORCH}"]: expected token counts from 1 to below'),
        (_data(times={"a": {TORCH: {"0": 1}}}), "expected token counts from 1"),
        (_data(times={"a": {TORCH: {"1": 5, " 1": 6}}}), 'got " 1"'),
        (_data(times={"a": {TORCH: {"9" * 400: 1}}}), "expected token counts from 1 to below 2147483648, got"),
        (" " * (4 << 20) + "{}", "it has 4194306 bytes, at most 4194304 are read"),
        (_data(times={"a": [1]}), "times.a: expected an object, got a list"),
        (_data(times=3), "times: expected an object, got 3"),
        (_data(environment={"device_type": "gpu"}), "device_type"),
        (json.dumps({"schema": 1}), "field 'environment' is missing"),
    ],
)
def test_a_broken_or_older_cache_is_reported_and_ignored(cache: Path, shipped: Path, text: str, why: str) -> None:
    FILE.write(shipped / "h100.json")
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    with pytest.warns(MeasurementWarning) as caught:
        table = default_measurements(HERE, VERSIONS)
    message = str(caught[0].message)
    expect(why in message and str(cache) in message and "not used" in message, message)
    expect(set(table.rows) == _shipped_rows(), table)
    expect(table.origins[-1].startswith("ignored: measurements "), table.origins)


@pytest.mark.error_path
def test_what_is_no_file_is_not_waited_for(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    os.mkfifo(cache)
    with pytest.warns(MeasurementWarning, match="cannot be read .*it is no regular file"):
        expect(default_measurements(HERE, VERSIONS).rows == ())


@pytest.mark.error_path
def test_a_file_that_does_not_fit_is_read_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attrs.evolve(FILE, environment=attrs.evolve(HERE, driver="")).write(cache)
    for _ in range(2):
        # Every layer of a model asks.
        with pytest.warns(MeasurementWarning, match="the machine has changed"):
            default_measurements(HERE, VERSIONS)
        monkeypatch.setattr(MeasurementFile, "read", None)


def test_a_folder_that_nobody_may_look_into_is_no_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FILE.write(cache)

    def refuse(path: Path) -> os.stat_result:
        raise PermissionError(str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(()))
    assert default_measurements(HERE, VERSIONS).rows == ()


@pytest.mark.error_path
def test_a_broken_shipped_table_is_reported_and_ignored(cache: Path, shipped: Path) -> None:
    FILE.write(cache)
    (shipped / "broken.json").write_text("{")
    with pytest.warns(MeasurementWarning, match=r"broken.json: cannot be read"):
        table = default_measurements(HERE, VERSIONS)
    expect(len(table.rows) == 4 and "broken.json" in table.origins[-1], table)


def _cpu(threads: int) -> Environment:
    return Environment(device_type="cpu", device_name="Maker 9, 2 CPUs", threads=threads, packages={"torch": "2.11.0"})


def test_every_number_of_threads_of_a_cpu_has_its_own_times(cache: Path) -> None:
    for threads in (1, 2):
        counted = attrs.evolve(FILE, environment=_cpu(threads), times={"shape": {TORCH: {1: Time(float(threads))}}})
        counted.write(user_file(_cpu(threads)))
    assert user_file(_cpu(1)).name == "cpu-maker-9-2-cpus-1-thread.json"
    for threads in (1, 2):
        table = default_measurements(_cpu(threads), VERSIONS)
        assert [row.microseconds for row in table.rows] == [threads]
        assert "Maker 9, 2 CPUs, " + ("1 thread" if threads == 1 else "2 threads") in table.origins[0]
    assert default_measurements(_cpu(3), VERSIONS).rows == ()


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("measured", "here", "told"),
    [
        ((2,), 1, "with 1 thread, but for 2 threads; OMP_NUM_THREADS says how many a program has, and"),
        (
            (16, 1, 2),
            4,
            "with 4 threads, but for 1, 2 and 16 threads; OMP_NUM_THREADS says how many a program has, and",
        ),
        (
            (1,),
            0,
            "with a number of threads that nobody knows, but for 1 thread; its description may say `threads`, and",
        ),
    ],
)
def test_times_of_other_numbers_of_threads_are_told_of(
    cache: Path, measured: tuple[int, ...], here: int, told: str
) -> None:
    for threads in measured:
        attrs.evolve(FILE, environment=_cpu(threads)).write(user_file(_cpu(threads)))
    # Another machine's, and what was put aside.
    other = attrs.evolve(_cpu(7), device_name="Maker 9, 2 CPUs, 8 threads")
    attrs.evolve(FILE, environment=other).write(user_file(other))
    user_file(_cpu(3)).with_suffix(".old.json").write_text("")
    table = default_measurements(_cpu(here), VERSIONS)
    assert (table.rows, table.origins) == ((), (f"none for this machine {told} moe-core tune makes others",))
    # As soon as there are some they are all there is to say.
    attrs.evolve(FILE, environment=_cpu(here)).write(user_file(_cpu(here)))
    assert [line.partition(":")[0] for line in default_measurements(_cpu(here), VERSIONS).origins] == ["your cache"]


@pytest.mark.error_path
def test_times_without_a_number_of_threads_are_reported_until_there_are_others(cache: Path) -> None:
    attrs.evolve(FILE, environment=_cpu(0)).write(user_file(_cpu(0)))
    with pytest.warns(
        MeasurementWarning, match="with how many threads they were taken is not known; run moe-core tune"
    ):
        table = default_measurements(_cpu(2), VERSIONS)
    expect(table.rows == () and table.origins[0].startswith("ignored: measurements "), table)
    # Whoever describes a machine without a number gets what was measured without.
    expect(len(default_measurements(_cpu(0), VERSIONS).rows) == 4)
    attrs.evolve(FILE, environment=_cpu(2)).write(user_file(_cpu(2)))
    expect(len(default_measurements(_cpu(2), VERSIONS).rows) == 4)
    expect(older_file(_cpu(2)) is None)


@pytest.mark.error_path
def test_a_named_file_of_other_threads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    attrs.evolve(FILE, environment=_cpu(1)).write(path)
    message = r"they are of Maker 9, 2 CPUs, 1 thread, the machine is Maker 9, 2 CPUs, 2 threads"
    with pytest.raises(SpecError, match=message):
        explicit_measurements(path, _cpu(2))
    expect(len(explicit_measurements(path, _cpu(0)).rows) == 4)
    expect("thread" not in attrs.evolve(FILE, environment=HERE).to_text(), "files of other devices stay as they were")


@pytest.mark.error_path
def test_without_a_home_there_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "")

    def unknown(number: int) -> NoReturn:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    expect(not user_file(HERE).is_absolute())
    expect(default_measurements(HERE, VERSIONS).rows == ())


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"driver": "CUDA 12.8"}, "driver CUDA 12.8 there, CUDA 13.0 here"),
        ({"packages": {"torch": "2.10.0", "triton": "3.6.0"}}, "torch 2.10.0 there, 2.11.0 here"),
        ({"packages": {"torch": "2.11.0", "gone": "1"}}, "gone 1 there, not installed here"),
        ({"threads": 4}, "threads 4 there, unknown here"),
        ({"device_name": "NVIDIA H200"}, "device_name NVIDIA H200 there, NVIDIA H100 80GB HBM3 here"),
    ],
)
def test_a_cache_of_another_machine_is_reported_and_ignored(cache: Path, change: dict[str, Any], why: str) -> None:
    attrs.evolve(FILE, environment=attrs.evolve(HERE, **change)).write(cache)
    with pytest.warns(MeasurementWarning, match=why):
        table = default_measurements(HERE, VERSIONS)
    expect(table.rows == () and why in table.origins[0], table)


def test_what_was_installed_since_does_not_count(cache: Path) -> None:
    attrs.evolve(FILE, environment=attrs.evolve(HERE, packages={"torch": "2.11.0"})).write(cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(default_measurements(HERE, VERSIONS | {"new": "1.0"}).rows) == 4


@pytest.mark.error_path
def test_times_of_another_version_of_a_plugin_are_left_out(cache: Path) -> None:
    FILE.write(cache)
    with pytest.warns(MeasurementWarning, match=r"vendor \(moe-plugin-vendor 1.0 there, moe-plugin-vendor 1.1 here\)"):
        table = default_measurements(HERE, VERSIONS | {"vendor": "moe-plugin-vendor 1.1"})
    expect({row.candidate for row in table.rows} == {TORCH}, table.rows)
    expect(table.origins[-1].startswith("ignored: measurements "), table.origins)


@pytest.mark.error_path
def test_an_explicit_file(tmp_path: Path) -> None:
    path = tmp_path / "h100.json"
    FILE.write(path)
    expect(len(explicit_measurements(path, PRESETS["h100"]).rows) == 4)
    with pytest.raises(SpecError, match="they are of NVIDIA H100 80GB HBM3, the machine is NVIDIA H200"):
        explicit_measurements(path, PRESETS["h200"])
    with pytest.raises(SpecError, match=r"none.json: cannot be read"):
        explicit_measurements(tmp_path / "none.json", HERE)


def test_the_tables_that_ship_can_be_read() -> None:
    for path in measurement_sources.SHIPPED.glob("*.json"):
        file = MeasurementFile.read(path)
        assert is_of_card(file.environment, PRESETS[path.stem])
        assert file.num_times > 0
