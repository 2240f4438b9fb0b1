"""`moe-core doctor`: packages against requirements, broken plugins, variables of other projects."""

from __future__ import annotations

import json
import re
from importlib import import_module

import attrs
import pytest
from fakes import dispatcher, manager_of, plugin, runner

from moe_core.cli.foreign_variables import KNOWN, foreign_variables
from moe_core.environment import Environment
from moe_core.specs import Requirement

pytestmark = pytest.mark.error_path


@pytest.fixture(scope="module")
def document(moe_core):
    result = moe_core(
        "doctor",
        "--json",
        sites=("broken", "vendors"),
        SGLANG_DEEPEP_BF16_DISPATCH="1",
        VLLM_SOMETHING_NEW="x",
        VENDOR_MODE="other",
    )
    assert result.returncode == 1
    return json.loads(result.stdout)


def test_a_machine_with_the_built_in_plugin_alone(moe_core):
    result = moe_core("doctor", COLUMNS="120")
    assert result.returncode == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) < 24
    assert lines[0].startswith("device")
    assert any(line.split()[:1] == ["torch"] and "ready" in line for line in lines)
    assert any(line.split()[:1] == ["torch"] and ">= 2.10 by torch" in line for line in lines)
    assert "to install" not in result.stdout


def test_packages_are_compared_with_what_plugins_need(document):
    packages = {package["module"]: package for package in document["packages"]}
    assert packages["torch"]["missing"] == []
    missing = {module for module, package in packages.items() if package["missing"]}
    assert missing
    for module in missing:
        assert packages[module]["found"] is None
        assert packages[module]["needed"]


def test_broken_plugins_are_named_with_their_tracebacks(document):
    plugins = {plugin["name"]: plugin for plugin in document["plugins"]}
    assert plugins["torch"]["status"] == "ready"
    broken = [plugin for plugin in document["plugins"] if plugin["status"] in ("failed", "conflict")]
    assert {"import_fails", "exits", "other_api", "twin"} <= {plugin["name"] for plugin in broken}
    assert all(plugin["problem"] and plugin["traceback"] for plugin in broken)


def test_the_screen_says_what_to_install(moe_core):
    result = moe_core("doctor", sites=("vendors",), COLUMNS="160")
    assert "to install" in result.stdout
    assert "unavailable" in result.stdout


def _asking(name, devices, *requirements):
    declared = runner(name, devices=devices, requirements=requirements)
    return plugin(name, dispatchers=[dispatcher(name, devices=devices)], runners=[declared])


LATER, OLDER = (Requirement(module="lib", minimum=low, install=f"pip install 'lib>={low}'") for low in ("0.10", "0.9"))
HERE = _asking("here", ("cpu",), OLDER, LATER, Requirement(module="there", minimum="2", install="pip install there"))
OTHER_BUILD = _asking("other_build", ("cpu",), attrs.evolve(OLDER, excluded=">=1", install="build lib"))
ELSEWHERE = _asking("elsewhere", ("npu",), Requirement(module="npu_lib", install="pip install npu_lib"))


@pytest.fixture
def screen(call, monkeypatch):
    """The lines that `doctor` prints on a CPU that has these packages and plugins, below each heading."""

    def show(packages, *plugins):
        manager = manager_of(*plugins)
        monkeypatch.setattr(manager, "probe", lambda: Environment(device_type="cpu", packages=packages))
        monkeypatch.setattr(import_module("moe_core.cli.doctor"), "default_manager", lambda: manager)
        blocks = [block.splitlines() for block in re.split(r"\n *\n", call("doctor")[1])]
        return {block[0].strip(): [" ".join(line.split()) for line in block[1:]] for block in blocks}

    return show


def test_what_to_install_is_said_per_plugin_and_apart_for_other_devices(screen):
    blocks = screen({"torch": "2.13", "there": "2.1"}, HERE, OTHER_BUILD, ELSEWHERE)
    # The higher bound alone, and nothing that is there.
    assert blocks["to install"] == ["here pip install 'lib>=0.10'", "other_build build lib"]
    assert blocks["to install, for other devices"] == ["elsewhere pip install npu_lib"]


def test_a_build_that_serves_is_not_to_be_installed(screen):
    blocks = screen({"torch": "2.13", "there": "2.1", "lib": "1.1"}, HERE, OTHER_BUILD)
    assert blocks["to install"] == ["other_build build lib"]
    assert "to install, for other devices" not in blocks


def test_variables_of_other_projects(document):
    variables = {variable["name"]: variable for variable in document["variables"]}
    assert "dispatch_dtype='bf16'" in variables["SGLANG_DEEPEP_BF16_DISPATCH"]["here"]
    assert variables["VLLM_SOMETHING_NEW"]["here"] == "not read"
    assert foreign_variables({"PATH": "/bin"}) == []
    assert [variable.name for variable in foreign_variables(dict.fromkeys(KNOWN, "1"))] == sorted(KNOWN)


def test_variables_that_plugins_libraries_read_are_part_of_the_machine(document, moe_core):
    assert document["environment"]["variables"] == {"VENDOR_MODE": "other"}
    assert "VENDOR_MODE" not in {variable["name"] for variable in document["variables"]}
    screen = moe_core("doctor", sites=("vendors",), VENDOR_MODE="other", COLUMNS="160").stdout
    assert any(line.split() == ["variables", "VENDOR_MODE=other"] for line in screen.splitlines())
