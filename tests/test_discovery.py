from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import expect

from moe_core import discovery
from moe_core.discovery import Failed, Loaded, find, load
from moe_core.errors import PluginError, UnknownNameError
from moe_core.manager import ALLOW_LIST_VARIABLE, default_manager

GOOD = """
from moe_core.hookspecs import hookimpl
from moe_core.specs import PluginSpec

@hookimpl
def declare_backends():
    return PluginSpec(name={name!r}, hook_api=1)
"""
RE_ENTRANT = """
from moe_core.manager import default_manager
default_manager()
"""


class Site:
    """A folder on the path with distributions in it, as an installer would leave them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        folder.mkdir()
        monkeypatch.syspath_prepend(str(folder))

    def install(
        self, name: str, module: str, source: str = GOOD, distribution: str = "", suffix: str = "dist-info"
    ) -> None:
        distribution = distribution or f"dist-{module.replace('_', '-')}"
        metadata = self.folder / f"{distribution.replace('-', '_')}-1.2.{suffix}"
        metadata.mkdir()
        described = "METADATA" if suffix == "dist-info" else "PKG-INFO"
        (metadata / described).write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (metadata / "entry_points.txt").write_text(f"[moe_core.backends]\n{name} = {module}\n")
        (self.folder / f"{module}.py").write_text(source.format(name=name))
        self.monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    default_manager.cache_clear()
    yield Site(tmp_path / "site", monkeypatch)
    default_manager.cache_clear()


def test_finding_is_sorted_and_imports_nothing(site: Site) -> None:
    site.install("zeta", "found_zeta")
    site.install("alpha", "found_alpha")
    found = [plugin for plugin in find() if plugin.value.startswith("found_")]
    assert [plugin.name for plugin in found] == ["alpha", "zeta"]
    assert (found[0].distribution, found[0].version) == ("dist-found-alpha", "1.2")
    assert str(site.folder) in found[0].location
    assert not {"found_alpha", "found_zeta"} & set(sys.modules)


@pytest.mark.parametrize("second", ["twice-seen", "twice_seen", "Twice.Seen"])
def test_one_distribution_seen_twice_counts_once(site: Site, tmp_path: Path, second: str) -> None:
    site.install("twice", "found_twice", distribution="twice-seen")
    Site(tmp_path / "other", site.monkeypatch).install("twice", "found_twice", distribution=second, suffix="egg-info")
    assert [plugin.name for plugin in find(["twice"])] == ["twice"]


@pytest.mark.error_path
@pytest.mark.error_path
def test_metadata_that_cannot_be_read_hides_a_version_and_not_the_plugins(site: Site) -> None:
    site.install("alpha", "alpha_module")
    site.install("beta", "beta_module")
    (site.folder / "dist_alpha_module-1.2.dist-info" / "METADATA").write_bytes(b"\xff\xfe")
    with pytest.warns(UserWarning, match=r"metadata of .*dist_alpha_module.* cannot be read, its version is unknown"):
        found = find(["alpha", "beta"])
    assert [(each.name, each.version) for each in found] == [("alpha", ""), ("beta", "1.2")]


def test_two_distributions_of_one_name(site: Site) -> None:
    site.install("toy", "found_one")
    site.install("toy", "found_two")
    site.monkeypatch.setenv(ALLOW_LIST_VARIABLE, "toy")
    rows = [(row.distribution, row.status) for row in default_manager().reports()]
    expect(rows == [("dist-found-one", "conflict"), ("dist-found-two", "conflict")], rows)


@pytest.mark.parametrize(("allowed", "names"), [([], []), (["b"], ["b"]), (["b", "a", "b"], ["a", "b"])])
def test_the_allow_list(site: Site, allowed: list[str], names: list[str]) -> None:
    site.install("a", "found_a")
    site.install("b", "found_b")
    assert [plugin.name for plugin in find(allowed)] == names


@pytest.mark.parametrize(("value", "names"), [("", ()), (" a , b,", ("a", "b")), ("a", ("a",))])
def test_the_allow_list_variable(site: Site, value: str, names: tuple[str, ...]) -> None:
    site.install("a", "found_a")
    site.install("b", "found_b")
    site.monkeypatch.setenv(ALLOW_LIST_VARIABLE, value)
    assert default_manager().names() == names
    assert default_manager() is default_manager()


def test_these_tests_see_the_plugins_of_the_core_alone(site: Site) -> None:
    site.install("stranger", "found_stranger")
    assert default_manager().names() == ("torch", "triton")


def test_without_the_variable_every_plugin_is_loaded(site: Site) -> None:
    site.install("stranger", "found_stranger")
    site.monkeypatch.delenv(ALLOW_LIST_VARIABLE)
    assert {"stranger", "torch", "triton"} <= set(default_manager().names())


@pytest.mark.error_path
def test_an_unknown_name_in_the_allow_list_is_an_error_and_not_remembered(site: Site) -> None:
    site.install("deepep", "found_deepep")
    site.monkeypatch.setenv(ALLOW_LIST_VARIABLE, "depep")
    with pytest.raises(UnknownNameError, match=f"'depep'; did you mean 'deepep'.*named by .*{ALLOW_LIST_VARIABLE}"):
        default_manager()
    site.monkeypatch.setenv(ALLOW_LIST_VARIABLE, "deepep")
    expect(default_manager().names() == ("deepep",))


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import no_such_module", "ModuleNotFoundError"),
        ("raise SystemExit(4)", "SystemExit: 4"),
        ("1 +", "SyntaxError"),
        ("class Own(BaseException): pass\nraise Own('gone')", "Own: gone"),
        ("raise BaseExceptionGroup('two', [GeneratorExit()])", "BaseExceptionGroup: two"),
        ("class Mute(Exception):\n    def __str__(self): return 1 / 0\nraise Mute", "Mute: its text cannot be read"),
        (r"raise RuntimeError('a\n\n b \x1b[31m\u202ec')", r"RuntimeError: a b \x1b[31m\u202ec"),
        ("raise RuntimeError('x' * 1_000_000)", f"RuntimeError: {'x' * 1000}..."),
    ],
)
def test_a_plugin_that_fails_on_import(site: Site, source: str, error: str) -> None:
    site.install("broken", "found_broken", source=source)
    (found,) = find(["broken"])
    failed = load(found)
    expect(isinstance(failed, Failed) and str(failed).startswith(error), failed)
    expect("found_broken" in failed.traceback, failed.traceback)
    expect("\x1b" not in str(failed) + failed.traceback and len(str(failed)) < 1100, failed)


@pytest.mark.error_path
@pytest.mark.parametrize("value", ["", "a b", "1:2 3"])
def test_an_entry_point_that_names_no_module(site: Site, value: str) -> None:
    site.install("odd", "found_odd")
    (metadata,) = site.folder.glob("*.dist-info")
    (metadata / "entry_points.txt").write_text(f"[moe_core.backends]\nodd = {value}\n")
    (found,) = find(["odd"])
    expect(str(load(found)) == f"PluginError: the entry point names {value!r}, expected a module: 'package.module'")


@pytest.mark.error_path
def test_metadata_that_would_act_on_a_terminal_is_escaped(site: Site) -> None:
    site.install("\x1b[31mred\u202e", "found_red")
    site.install("b" * 5000, "found_long")
    found = {each.value: each.name for each in find() if each.value in ("found_red", "found_long")}
    expect(found == {"found_red": r"\x1b[31mred\u202e", "found_long": "b" * 200 + "..."}, found)


@pytest.mark.error_path
def test_an_interrupt_passes(site: Site) -> None:
    site.install("slow", "found_slow", source="raise KeyboardInterrupt")
    (found,) = find(["slow"])
    with pytest.raises(KeyboardInterrupt):
        load(found)


@pytest.mark.error_path
def test_a_plugin_that_asks_for_all_plugins_while_it_is_loaded(site: Site) -> None:
    site.install("greedy", "found_greedy", source=RE_ENTRANT)
    site.install("good", "found_good")
    site.monkeypatch.setenv(ALLOW_LIST_VARIABLE, "greedy,good")
    manager = default_manager()
    expect(manager.names() == ("good",))
    with pytest.raises(PluginError, match=r"'greedy' .* asks for all plugins while it is being loaded"):
        manager.require("greedy")


def test_loading(site: Site) -> None:
    site.install("good", "found_good")
    (found,) = find(["good"])
    loaded = load(found)
    assert isinstance(loaded, Loaded)
    assert loaded.module is sys.modules["found_good"]
    assert str(found) == "'good' (dist-found-good 1.2, entry point found_good)"


INVALID = """
from moe_core.hookspecs import hookimpl
from moe_core.specs import PluginSpec, Requirement

@hookimpl
def declare_backends():
    return PluginSpec(name={name!r}, hook_api=1, requirements=(Requirement(module="x", minimum="newest"),))
"""


def test_a_slow_import_is_named_with_its_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("slow", "found_slow")
    monkeypatch.setattr(discovery, "SLOW_SECONDS", -1.0)
    (found,) = find(["slow"])
    with pytest.warns(UserWarning, match=r"importing plugin 'slow' \(dist-found-slow 1\.2, .*took \d+\.\d s"):
        loaded = load(found)
    expect(isinstance(loaded, Loaded), loaded)


def test_what_a_plugin_prints_on_import_does_not_reach_stdout(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("loud", "found_loud", "print('here I am')\n" + GOOD)
    (found,) = find(["loud"])
    with pytest.warns(UserWarning, match=r"importing plugin 'loud' .*printed 'here I am"):
        loaded = load(found)
    expect(isinstance(loaded, Loaded), loaded)
    assert capsys.readouterr().out == ""


def test_what_a_plugin_prints_in_its_declaration_does_not_reach_stdout(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("loud", "found_loud", GOOD.replace("    return", "    print('me')\n    return"))
    site.monkeypatch.setenv(ALLOW_LIST_VARIABLE, "loud")
    with pytest.warns(UserWarning, match=r"reading the declaration of plugin 'loud' .*printed 'me"):
        assert default_manager().names() == ("loud",)
    assert capsys.readouterr().out == ""


@pytest.mark.error_path
def test_an_interrupted_import_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("stuck", "found_stuck", source="raise KeyboardInterrupt")
    monkeypatch.setattr(discovery, "SLOW_SECONDS", -1.0)
    (found,) = find(["stuck"])
    with pytest.warns(UserWarning, match=r"importing plugin 'stuck' .*took"), pytest.raises(KeyboardInterrupt):
        load(found)


@pytest.mark.error_path
def test_an_invalid_declaration_costs_only_its_plugin(site: Site) -> None:
    site.install("invalid", "found_invalid", INVALID)
    site.install("fine", "found_fine")
    site.monkeypatch.setenv(ALLOW_LIST_VARIABLE, "invalid,fine")
    manager = default_manager()
    expect("fine" in manager.names(), manager.reports())
    (failed,) = [failed for failed in manager.failures() if failed.found.name == "invalid"]
    expect(failed.stage == "register", failed)
    expect("Requirement 'x', field 'minimum': Invalid version: 'newest'" in str(failed), failed)
    with pytest.raises(PluginError, match=r"'invalid' \(dist-found-invalid 1\.2"):
        manager.require("invalid")
