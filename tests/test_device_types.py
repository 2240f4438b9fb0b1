"""Device types that the core does not know: plugins name them, torch finds them, and a misspelt one is an error."""

from __future__ import annotations

import types

import attrs
import pytest
import torch
from fakes import dispatcher, expect, manager_of, plugin, request, runner

from moe_core.backends.torch.plugin import declare_backends as shipped_torch
from moe_core.environment import Environment, probe_environment
from moe_core.errors import SpecError
from moe_core.resolver import resolve
from moe_core.specs import DeviceGeneration

ZEPHYR = Environment(device_type="zephyr", arch="z1", packages={"torch": "2.13.0"})


def _declared():
    parts = {"devices": ("zephyr",), "archs": ("z1",)}
    return plugin(
        "zephyr",
        dispatchers=[dispatcher("zephyr", **parts)],
        runners=[runner("zephyr", tier="tuned", **parts)],
        device_types=["zephyr"],
        generations=[DeviceGeneration("zephyr", "Zephyr One", "z1")],
    )


def test_a_plugin_brings_a_device_type() -> None:
    decision = resolve([_declared(), shipped_torch()], request(), ZEPHYR)
    assert decision.workloads[0].ranked[0].candidate.runner.full_name == "zephyr:zephyr.standard"
    assert manager_of(_declared()).device_types() == ("cpu", "cuda", "npu", "xpu", "mps", "meta", "zephyr")


def test_what_runs_anywhere_runs_on_a_device_that_no_plugin_names() -> None:
    decision = resolve([shipped_torch()], request(), attrs.evolve(ZEPHYR, source="probed"))
    assert decision.workloads[0].ranked[0].candidate.runner.plugin == "torch"


@pytest.mark.error_path
def test_a_described_device_type_that_nobody_knows() -> None:
    wrong = Environment(device_type="gpu", source="machine.json")
    with pytest.raises(
        SpecError, match=r"environment machine.json, field 'device_type': 'gpu' is not one of cpu, cuda"
    ):
        resolve([_declared()], request(), wrong)
    with pytest.raises(SpecError, match=r"'zephyr' is not one of cpu"):
        resolve([shipped_torch()], request(), ZEPHYR)


@pytest.mark.parametrize("has_module", [True, False])
def test_a_machine_with_a_device_type_of_its_own(monkeypatch: pytest.MonkeyPatch, has_module: bool) -> None:
    def module_of(device: str) -> object:
        if has_module:
            return types.SimpleNamespace(get_device_name=lambda: "Zephyr One rev B")
        raise RuntimeError(f"no module of {device}")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type="zephyr"))
    monkeypatch.setattr(torch, "get_device_module", module_of)
    found = probe_environment(generations=_declared().generations)
    name, arch = ("Zephyr One rev B", "z1") if has_module else ("zephyr", "")
    expect((found.device_type, found.device_name, found.arch) == ("zephyr", name, arch), found)
