"""What is asked of a machine, and what of it is the machine's."""

from __future__ import annotations

import types

import attrs
import pytest
import torch

from moe_core.environment import Environment
from moe_core.installed import installed_packages
from moe_core.probing import generation_of, probe_environment, unprobed_environment
from moe_core.specs import DeviceGeneration

GENERATIONS = (
    DeviceGeneration("npu", "Maker91", "old"),
    DeviceGeneration("npu", "Maker9100", "new"),
    DeviceGeneration("xpu", "Maker", "other"),
)


@pytest.mark.parametrize(
    ("device_type", "name", "arch"),
    [
        ("npu", "Maker91-B", "old"),
        ("npu", "Maker9100-B", "new"),
        ("npu", "Maker8", ""),
        ("xpu", "Maker8", "other"),
        ("cpu", "Maker91", ""),
    ],
)
def test_a_generation_is_known_by_the_longest_beginning_of_a_name(device_type: str, name: str, arch: str) -> None:
    for order in (GENERATIONS, GENERATIONS[::-1]):
        assert generation_of(device_type, name, order) == arch


def test_a_device_that_only_a_plugin_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    device = types.SimpleNamespace(get_device_name=lambda: "Maker9100-B")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type="npu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: {"npu": device}[device_type])
    known, unknown = probe_environment(generations=GENERATIONS), probe_environment()
    assert (known.device_type, known.device_name, known.arch) == ("npu", "Maker9100-B", "new")
    assert (unknown.device_name, unknown.arch) == ("Maker9100-B", "")


def test_the_cpu_has_no_generation() -> None:
    described = probe_environment(device_type="cpu", generations=GENERATIONS)
    assert (described.device_type, described.arch) == ("cpu", "")


def test_threads_tell_one_cpu_from_another_and_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    described = probe_environment(device_type="cpu")
    assert (described.threads, described.card) == (3, f"{described.device_name}, 3 threads")
    assert Environment.from_json(described.to_json()) == described
    assert described != attrs.evolve(described, threads=2)
    other = probe_environment(device_type="meta")
    assert (other.threads, "threads" in other.to_json()) == (0, False)


def test_an_unprobed_machine() -> None:
    described = unprobed_environment(["attr", "no_such_library"])
    assert described.device_type == "cpu"
    assert dict(described.packages) == installed_packages(["attr"])
