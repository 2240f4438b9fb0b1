from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from moe_core.environment import PRESETS, Environment, load_environment
from moe_core.errors import SpecError, UnknownNameError


@pytest.mark.parametrize("name", PRESETS)
def test_presets_travel(name: str, tmp_path: Path) -> None:
    preset = load_environment(name)
    assert preset.source == f"preset {name}"
    assert preset.version("torch")
    path = tmp_path / "machine.json"
    # As a file of its own, and as a part of what commands print.
    for content in (preset.to_json(), {"schema": 1, "environment": preset.to_json()}):
        path.write_text(json.dumps(content))
        read = load_environment(str(path))
        assert read == preset
        assert read.source == str(path)
    assert eval(repr(preset)) == pickle.loads(pickle.dumps(preset)) == preset


def test_packages_are_sorted_pairs() -> None:
    by_mapping = Environment(device_type="cpu", packages={"b": "2", "a": ""})
    assert by_mapping == Environment(device_type="cpu", packages=[("b", "2"), ("a", "")], source="elsewhere")
    assert by_mapping.packages == (("a", ""), ("b", "2"))
    assert [by_mapping.version(name) for name in "abc"] == ["", "2", None]


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"device_type": "CUDA:0"}, "Environment, field 'device_type': expected lower-case like 'cuda' or 'npu'"),
        ({"device_type": "cuda", "arch": "SM90"}, "field 'arch': expected lower-case"),
        ({"device_type": "cuda", "arch": 90}, "field 'arch'"),
        (
            {"device_type": "cpu", "packages": "torch"},
            "field 'packages': expected .import name, version. texts or a mapping",
        ),
        (
            {"device_type": "cpu", "packages": {"torch": None}},
            "field 'packages': expected .import name, version. texts",
        ),
        ({"device_type": "cpu", "packages": [("a", "1"), ("a", "2")]}, "'packages': a name occurs twice"),
        ({"device_type": "cpu", "variables": {"LIB_COUNTS": 1}}, "field 'variables': expected .name, value. texts"),
        ({"device_type": "cpu", "variables": [("A", "1"), ("A", "2")]}, "'variables': a name occurs twice"),
        ({"device_type": "cpu", "threads": -1}, "field 'threads': expected an int >= 0, got -1"),
    ],
)
def test_a_wrong_environment_names_the_field(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        Environment(**fields)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object, got a list"),
        ('{"arch": "sm90"}', "field 'device_type' is missing; known fields: arch, device_name"),
        ('{"device_type": "cuda", "sm": 90}', r"unknown fields \['sm'\]"),
        ("[" * 100_000, "not valid JSON .it is nested too deeply"),
        ('{"device_type": "cpu", "arch": "", "arch": "sm90"}', "not valid JSON .an object names the key 'arch' twice"),
        ('{"device_type": "cpu", "packages": {"a": "1", "a": "2"}}', "names the key 'a' twice"),
        ('{"device_type": 5}', "field 'device_type': expected a text, got a number"),
        ('{"device_type": "cpu", "arch": ["sm90"]}', "field 'arch': expected a text, got a list"),
        ('{"device_type": "cpu", "packages": ["torch"]}', r"'packages': expected an object like \{.*\}, got a list"),
        ('{"device_type": "cpu", "packages": 5}', r"'packages': expected an object like \{.*\}, got a number"),
        ('{"device_type": "cpu", "programs": true}', r"'programs': expected an object like \{.*\}, got a boolean"),
        ('{"device_type": "cpu", "variables": null}', r"'variables': expected an object like \{.*\}, got null"),
        (
            '{"device_type": "cpu", "packages": {"torch": 2.11}}',
            "'packages': expected a text for 'torch'.* got a number",
        ),
        ('{"device_type": "cpu", "packages": [["torch"]]}', "'packages': expected .import name, version. texts"),
        ('{"environment": {"device_type": "cpu", "driver": {}}}', "field 'driver': expected a text, got an object"),
        ('{"device_type": "cpu", "threads": "2"}', "field 'threads': expected a whole number, got a text"),
        ('{"device_type": "cpu", "threads": true}', "field 'threads': expected a whole number, got a boolean"),
        ('{"device_type": "GPU"}', "machine.json: Environment, field 'device_type'"),
        (
            '{"device_type": "cuda", "arch": "sm90", "environment": {"device_type": "cpu"}}',
            "two machines, one by arch, device_type and one by environment",
        ),
        ('{"device_type": "cpu", "device_name": "\\u001b[31m"}', "'device_name': expected a printable text, got "),
        ('{"device_type": "cpu", "driver": "a\\nb"}', "'driver': expected a printable text, got "),
        ('{"device_type": "cpu", "packages": {"a": "\\u001b"}}', "'packages': expected a printable text for 'a'"),
        ('{"device_type": "cpu", "packages": {"\\u001b": "1"}}', "'packages': expected printable names"),
        ('{"device_type": "cpu", "packages": {"": "1"}}', "'packages': a name is empty"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=match) as caught:
        load_environment(str(path))
    if "machine.json" not in str(caught.value):
        raise AssertionError(str(caught.value))


def test_a_file_with_a_mark_of_the_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"device_type": "cpu"}', encoding="utf-8-sig")
    assert load_environment(str(path)) == Environment(device_type="cpu")


def test_a_variable_may_hold_anything(tmp_path: Path) -> None:
    """As it was on the machine that a file describes."""
    machine = Environment(device_type="cpu", variables={"LIB_WORDS": "a\nb"})
    assert Environment.from_json(machine.to_json()) == machine


@pytest.mark.error_path
def test_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match=r"environment 'h10'; did you mean 'h100'.*path to a JSON file"):
        load_environment("h10")


@pytest.mark.error_path
@pytest.mark.parametrize("name", ["machine.json", "some/where", "/nope/m.json"])
def test_a_file_that_is_not_there_is_called_one(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=f"environment file {name}: no such file; presets are .*h100"):
        load_environment(name)


@pytest.mark.error_path
@pytest.mark.parametrize("name", ["folder", "folder.json", "pipe"])
def test_what_is_there_and_no_file_is_called_so(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(name) if name == "pipe" else Path(name).mkdir()
    with pytest.raises(SpecError, match=f"environment file {name}: it is there and is no regular file"):
        load_environment(name)


def test_a_preset_by_the_other_spelling() -> None:
    assert load_environment("ascend_a3") is PRESETS["ascend-a3"]
