"""Programs that libraries start: where they are looked for, what is recorded, and what the resolver says."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from fakes import dispatcher, manager_of, plugin, request, runner

from moe_core import specs
from moe_core.environment import Environment
from moe_core.errors import ResolutionError, SpecError
from moe_core.installed import program_path, programs_found
from moe_core.planner import make_plan
from moe_core.probing import unprobed_environment
from moe_core.request import Workload
from moe_core.specs import Program, Requirement

COMPILER = Program(
    name="libcc", folders=("LIB_HOME", "LIB_PATH"), default="", unless=("LIB_READY",), install="install a toolkit"
)
TOY = plugin(
    "toy",
    dispatchers=[dispatcher()],
    runners=[runner(requirements=(Requirement(module="lib", programs=(COMPILER,)),))],
)
LAYER = request(num_experts=8, top_k=2, hidden_size=4096, ep_size=2, workloads=Workload(max_tokens=16))


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a toolkit with the compiler; none is anywhere before."""
    for name in (*COMPILER.folders, *COMPILER.unless):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))

    def made(name: str) -> Path:
        program = tmp_path / name / "bin" / "libcc"
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
        return program

    return made


def test_a_program_is_looked_for_where_its_library_looks(
    toolkit: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program_path(COMPILER) == ""
    by_default = toolkit("default")
    compiler = attrs.evolve(COMPILER, default=str(by_default.parents[1]))
    assert program_path(compiler) == str(by_default)
    on_path = toolkit("path")
    assert program_path(compiler) == str(on_path)
    second = toolkit("second")
    monkeypatch.setenv("LIB_PATH", str(second.parents[1]))
    assert program_path(compiler) == str(second)
    # A variable that points to nothing is not made good by what lies elsewhere: the library does not look there.
    monkeypatch.setenv("LIB_HOME", str(by_default))
    assert program_path(compiler) == ""
    assert programs_found([COMPILER, attrs.evolve(COMPILER, folders=())]) == {"libcc": str(on_path)}


def machine(programs: dict[str, str], **variables: str) -> Environment:
    packages = {"torch": "2.13", "lib": "1"}
    return Environment(device_type="cpu", packages=packages, variables=variables, programs=programs)


@pytest.mark.error_path
def test_a_missing_program_is_a_reason() -> None:
    with pytest.raises(ResolutionError, match="program: needs libcc for lib, found none; install a toolkit"):
        make_plan(manager_of(TOY), LAYER, machine({"libcc": ""}))


@pytest.mark.parametrize(
    "there", [machine({"libcc": "/bin/libcc"}), machine({}), machine({"libcc": ""}, LIB_READY="1")], ids=str
)
def test_a_program_that_is_there_or_needless_or_not_looked_for_is_none(there: Environment) -> None:
    assert make_plan(manager_of(TOY), LAYER, there)[0].routes


def test_a_zero_asks_for_nothing() -> None:
    assert [COMPILER.is_needed({"LIB_READY": value}) for value in ("", "0", "1", "yes")] == [True, True, False, False]


def test_a_machine_records_what_libraries_start(
    toolkit: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIB_READY", "0")
    plugins = manager_of(TOY)
    assert plugins.programs_started() == (COMPILER,)
    assert plugins.variables_read() == ("LIB_READY",)
    probed, path = plugins.probe("cpu"), toolkit("path")
    assert (probed.programs, probed.variables) == ((("libcc", ""),), (("LIB_READY", "0"),))
    found = unprobed_environment(programs=plugins.programs_started())
    assert found.programs == (("libcc", str(path)),)
    assert Environment.from_json(found.to_json()) == found
    assert found.to_json()["programs"] == {"libcc": str(path)}


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Program(name="no name"), "field 'name'"),
        (lambda: Program(name="cc", folders="LIB_HOME"), "field 'folders': expected a tuple of names"),
        (lambda: Requirement(module="lib", programs=COMPILER), "field 'programs': expected a tuple"),
    ],
)
def test_a_wrong_declaration(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        make()


def test_a_declaration_travels() -> None:
    assert eval(repr(COMPILER), vars(specs)) == pickle.loads(pickle.dumps(COMPILER)) == COMPILER
