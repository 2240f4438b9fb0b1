"""Device types that the core does not know: plugins name them, torch finds them, and a misspelt one is an error."""

from __future__ import annotations

import types

import attrs
import pytest
import torch
from fakes import dispatcher, expect, manager_of, plugin, request, runner

from moe_core.backends.torch.plugin import declare_backends as shipped_torch
from moe_core.described import doubts, unasked, unnamed_arch
from moe_core.environment import Environment
from moe_core.errors import SpecError
from moe_core.probing import probe_environment
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
        SpecError, match=r"machine.json, field 'device_type': 'gpu' is not one of cpu, .*; did you mean 'cuda'\?"
    ):
        resolve([_declared()], request(), wrong)
    with pytest.raises(SpecError, match=r"'zephyr' is not one of cpu"):
        resolve([shipped_torch()], request(), ZEPHYR)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("device", "arch", "told"),
    [
        ("zephyr", "z2", "'z2' is not one of z1; others come with plugins that name them; .* list-backends shows"),
        ("cuda", "hopper", "is no generation of cuda, expected sm and the compute capability, such as sm90, sm100$"),
        ("cuda", "sm9", "such as sm90, sm100; did you mean 'sm90'?"),
        ("cuda", "sm90a", "did you mean 'sm90'?"),
        ("cuda", "90", "is no generation of cuda"),
        ("cuda", "z1", "'z1' is a generation of zephyr, 'device_type' is 'cuda'"),
        ("cpu", "sm90", "'sm90' is a generation of cuda, 'device_type' is 'cpu'"),
        ("npu", "sm120", "'sm120' is a generation of cuda"),
        ("zephir", "z1", "'zephir' is not one of .*; did you mean 'zephyr'?"),
    ],
)
def test_a_described_generation_that_nobody_knows(device: str, arch: str, told: str) -> None:
    cards = plugin(runners=[runner(devices=("cuda",), archs=("sm90", "sm100"))])
    wrong = Environment(device_type=device, arch=arch, source="machine.json")
    with pytest.raises(SpecError, match=told.replace("?", r"\?")) as caught:
        resolve([_declared(), cards], request(), wrong)
    field = "device_type" if device == "zephir" else "arch"
    expect(str(caught.value).startswith(f"environment machine.json, field {field!r}: "), caught.value)
    # What torch says of a machine is taken, and a description of the same is not for that.
    resolve([_declared(), cards], request(), attrs.evolve(wrong, source="probed"))
    with pytest.raises(SpecError, match=r"environment again\.json"):
        resolve([_declared(), cards], request(), attrs.evolve(wrong, source="again.json"))


@pytest.mark.parametrize(
    ("device", "arch"), [("cuda", ""), ("cuda", "sm70"), ("cuda", "sm121"), ("npu", "a9"), ("cpu", "x"), ("zephyr", "")]
)
def test_a_described_generation_that_may_exist(device: str, arch: str) -> None:
    # No plugin here knows those of npu and cpu; that of a CUDA device may be older or newer than all that is declared.
    described = Environment(device_type=device, arch=arch, packages=ZEPHYR.packages, source="machine.json")
    assert resolve([_declared(), shipped_torch()], request(), described).is_feasible


@pytest.mark.parametrize(
    ("arch", "nearest"),
    [("sm77", "sm80"), ("sm85", "sm80, sm90"), ("sm99", "sm90, sm100"), ("sm199", "sm120")],
)
def test_the_nearest_of_a_generation_that_nothing_names(arch: str, nearest: str) -> None:
    # Presets have sm90 and sm100.
    cards = plugin(runners=[runner(devices=("cuda",), archs=("sm120", "sm80"))])
    described = Environment(device_type="cuda", arch=arch, source="machine.json")
    told = unnamed_arch(described, [_declared(), cards])
    expect(told.startswith(f"environment machine.json: no plugin names {arch}, "), told)
    expect(told.endswith(f"; the nearest that are named: {nearest}"), told)
    for known in (
        attrs.evolve(described, source="probed"),
        attrs.evolve(described, arch=""),
        attrs.evolve(described, arch="sm100"),
        attrs.evolve(described, arch="sm80"),
        attrs.evolve(described, device_type="zephyr", arch="z1"),
    ):
        expect(unnamed_arch(known, [_declared(), cards]) == "", known)


def test_a_generation_that_a_plugin_names_for_the_device_type_is_known_whatever_its_form() -> None:
    # Another device type has one of this name, too.
    named = {"devices": ("cuda",), "archs": ("z1",)}
    own = plugin(dispatchers=[dispatcher(**named)], runners=[runner(**named)])
    described = Environment(device_type="cuda", arch="z1", source="machine.json")
    assert resolve([_declared(), own], request(), described).is_feasible


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


@pytest.mark.parametrize("source", ["machine.json", "probed", "preset zephyr"])
def test_a_device_type_for_which_no_plugin_has_anything_is_told(source: str) -> None:
    machine = attrs.evolve(ZEPHYR, source=source)
    (told,) = doubts(machine, [shipped_torch()])
    assert "no installed plugin has anything made for zephyr" in told
    assert list(doubts(machine, [shipped_torch(), _declared()])) == []


@pytest.mark.error_path
def test_names_that_no_plugin_asks_for_are_told_with_those_that_may_be_meant() -> None:
    asked = {"packages": ["torch", "deep_ep"], "variables": ["HCCL_BUFFSIZE"], "programs": ["nvcc"]}
    described = Environment(
        device_type="cuda",
        # torch_x is like torch, which is there itself.
        packages={"torch": "2.11.0", "torch_x": "1", "deep-ep": "1.2", "numpy": "2"},
        variables={"HCCL_BUFSIZE": "1"},
        programs={"nvcc": ""},
        source="machine.json",
    )
    packages, variables = unasked(described, asked)
    where, asks = "environment machine.json, field", "no installed plugin asks for"
    names = "deep-ep (did you mean 'deep_ep'?), numpy, torch_x; packages go by the names that are imported"
    assert packages == f"{where} 'packages': {asks} {names}"
    assert variables == f"{where} 'variables': {asks} HCCL_BUFSIZE (did you mean 'HCCL_BUFFSIZE'?)"
    for source in ("probed", "preset h100"):
        assert list(unasked(attrs.evolve(described, source=source), asked)) == []
