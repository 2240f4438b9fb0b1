"""`moe-core list-backends` with working, unavailable and broken plugins."""

from __future__ import annotations

import json

import pytest

from moe_core.cli.list_backends import reason_rows
from moe_core.environment import PRESETS
from moe_core.findings import Reason
from moe_core.manager import BackendManager, default_manager

pytestmark = pytest.mark.error_path

NOT_PROBED = ("list-backends", "--no-probe")


@pytest.fixture(scope="module")
def broken(moe_core):
    return moe_core(*NOT_PROBED, "--strict", "-v", sites=("broken", "vendors"))


def _backends(result):
    document = json.loads(result.stdout)
    assert document["schema"] == 1
    return {backend["name"]: backend for backend in document["backends"]}


def test_the_built_in_plugins_are_listed(moe_core):
    result = moe_core(*NOT_PROBED, COLUMNS="160")
    assert result.returncode == 0
    assert result.stderr == ""
    plugins, names = result.stdout.split("\n\n")
    header, torch_row, triton_row = plugins.splitlines()
    assert header.split() == ["NAME", "VERSION", "DEVICE", "STATUS"]
    assert torch_row.split() == ["torch", torch_row.split()[1], "any", "ready"]
    # Its package is there on some systems only.
    assert triton_row.split()[:3] == ["triton", triton_row.split()[1], "cuda"]
    header, dispatchers, runners, peers, triton, panels, allowed, note = names.splitlines()
    assert header.split() == ["NAME", "DECLARES", "VARIANTS"]
    assert dispatchers.split() == [
        *("torch", "dispatchers", "none.standard,", ".contiguous,", ".masked,"),
        *("torch_alltoall.standard,", ".contiguous,", ".masked"),
    ]
    assert runners.split() == [
        *("runners", "torch.standard,", ".contiguous,", ".masked,"),
        *(".standard_invariant,", ".contiguous_invariant,", ".masked_invariant"),
    ]
    assert peers.split() == ["triton", "dispatchers", "peer_memory.standard,", ".contiguous,", ".masked"]
    assert [*triton.split(), *panels.split()] == [
        *("runners", "triton.standard,", ".contiguous,", ".masked,", ".fused,", ".standard_panels,", ".fused_panels,"),
        *(".standard_untuned,", ".contiguous_untuned,", ".masked_untuned,", ".fused_untuned"),
    ]
    assert allowed == "plugins that are loaded: only torch, triton (by variable MOE_CORE_PLUGINS)"
    assert "not looked at" in note


def test_the_tiers_by_which_runners_rank_are_told_on_request(moe_core):
    shown = moe_core(*NOT_PROBED, "-v", COLUMNS="160").stdout
    lines = [line.removeprefix("tiers").strip() for line in shown.splitlines()]
    assert "fused: triton.fused" in lines
    assert lines.index("tuned: triton.standard, .fused_panels") == lines.index("fused: triton.fused") + 1
    assert "tuned" not in moe_core(*NOT_PROBED).stdout.replace("_untuned", "")
    found = _backends(moe_core(*NOT_PROBED, "--json"))
    assert {runner["name"]: runner["tier"] for runner in found["triton"]["runners"]}["triton.fused"] == "fused"
    assert all("tier" not in dispatcher for dispatcher in found["torch"]["dispatchers"])


@pytest.mark.parametrize("columns", [72, 80, 120])
def test_tables_fit_and_lose_nothing(moe_core, columns):
    result = moe_core(*NOT_PROBED, sites=("broken", "vendors"), COLUMNS=str(columns), NO_COLOR="1")
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= columns
    words = result.stdout.replace("\n", " ").split()
    for name in (
        "flashinfer_cutedsl.masked",
        "deep_gemm.contiguous,",
        ".low_latency",
        "'a_module_that_does_not_exist'",
    ):
        assert name in words


def test_a_terminal_gets_colours(moe_core):
    assert "\x1b" in moe_core(*NOT_PROBED, FORCE_COLOR="1").stdout


def test_strict_fails_and_names_the_broken_plugins(broken):
    assert broken.returncode == 1
    assert broken.stderr.splitlines()[-1] == (
        "error: failed plugins: exits, import_fails, other_api, twin; see moe-core list-backends -v"
    )


def test_a_variable_that_contradicts_a_library_is_a_reason(moe_core):
    result = moe_core(*NOT_PROBED, "-v", sites=("vendors",), VENDOR_MODE="other", COLUMNS="160")
    assert "variable: needs VENDOR_MODE unset or default, found VENDOR_MODE=other" in result.stdout


def test_broken_plugins_do_not_matter_without_strict(moe_core):
    assert moe_core(*NOT_PROBED, sites=("broken",)).returncode == 0


def test_verbose_shows_origin_hooks_reasons_and_tracebacks(broken):
    text = broken.stdout
    for expected in (
        "fails_on_import-1.0.dist-info",
        "vendor-gemm 0.2.0, entry point vendor_gemm_plugin",
        "declare_backends, process_weights_after_loading",
        "package: needs deep_ep, found not installed",
        "Traceback (most recent call last)",
        "import a_module_that_does_not_exist",
        "SystemExit: 3",
    ):
        # A long path is broken anywhere.
        assert "".join(expected.split()) in "".join(text.split())


def test_what_is_against_all_parts_of_a_plugin_is_said_once():
    package, device = (Reason(code, "needs", "found") for code in ("package", "device"))
    rows = reason_rows({"a": (package, device), "b": (device,)})
    assert rows == {"all of these": str(device), "a": str(package), "b": "nothing else"}
    assert reason_rows({"a": (package,), "b": ()}) == {"a": str(package), "b": "yes"}
    assert reason_rows({"a": (package,)}) == {"a": str(package)}
    assert reason_rows({}) == {}


def test_json_lists_every_plugin(moe_core):
    backends = _backends(moe_core(*NOT_PROBED, "--json", sites=("broken", "vendors")))
    assert {name: backend["status"] for name, backend in backends.items() if name != "triton"} == {
        "torch": "ready",
        "cuda_vendor_gemm": "unavailable",
        "cuda_vendor_fp4": "ready",
        "exits": "failed",
        "import_fails": "failed",
        "other_api": "failed",
        "twin": "conflict",
    }
    gemm = backends["cuda_vendor_gemm"]
    assert gemm["problem"] == "deep_ep, deep_gemm >= 2.5 not installed"
    assert gemm["distribution"] == "vendor-gemm"
    assert [part["name"] for part in gemm["dispatchers"]] == ["deepep.normal", "deepep.low_latency"]
    assert [reason["code"] for reason in gemm["dispatchers"][0]["reasons"]] == ["package", "package"]
    assert "ModuleNotFoundError" in backends["import_fails"]["traceback"]
    assert "hook API 2" in backends["other_api"]["error"]


@pytest.mark.parametrize(
    ("preset", "gemm", "fp4"),
    [
        ("cpu", "unavailable: device: needs cuda, found cpu", "unavailable: device: needs cuda, found cpu"),
        ("h100", "ready", "unavailable: arch: needs sm100 or sm103, found sm90"),
        ("b200", "ready", "ready"),
        ("ascend-a3", "unavailable: device: needs cuda, found npu", "unavailable: device: needs cuda, found npu"),
    ],
)
def test_status_on_a_machine(call, monkeypatch, with_vendors, preset, gemm, fp4):
    monkeypatch.setattr(BackendManager, "probe", lambda manager: PRESETS[preset])
    code, out, _ = call("list-backends", "--json")
    assert code == 0
    status = {b["name"]: ": ".join(filter(None, (b["status"], b["problem"]))) for b in json.loads(out)["backends"]}
    assert (status["cuda_vendor_gemm"], status["cuda_vendor_fp4"]) == (gemm, fp4)


def test_a_plugin_that_is_ready_in_part_says_what_is_missing(call, monkeypatch, with_vendors):
    h100 = PRESETS["h100"]
    without = [pair for pair in h100.packages if pair[0] != "deep_ep"]
    machine = type(h100)(device_type="cuda", arch="sm90", packages=without)
    monkeypatch.setattr(BackendManager, "probe", lambda manager: machine)
    _, out, _ = call("list-backends")
    assert "ready but not deepep" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("list-backends", "--no-probe"), 0, "no backend: environment variable MOE_CORE_PLUGINS allows none"),
        (("verify",), 1, "error: no backend: environment variable MOE_CORE_PLUGINS allows none"),
        (("doctor",), 0, "only none (by variable MOE_CORE_PLUGINS)"),
        (("resolve", "--environment", "cpu"), 1, "no plugin declares any: see moe-core list-backends"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_no_backend_at_all(call, monkeypatch, words, code, said):
    monkeypatch.setenv("MOE_CORE_PLUGINS", "")
    default_manager.cache_clear()
    try:
        found, out, err = call(*words)
    finally:
        default_manager.cache_clear()
    assert (found, said in " ".join(f"{out} {err}".split())) == (code, True), err
