"""What `list-backends` shows for each way in which an installed plugin may be at fault: the exact line."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.error_path

#: Plugin -> version and status; nothing else is known of one that failed.
LINES = {
    "import_fails": "1.0 failed: ModuleNotFoundError: No module named 'a_module_that_does_not_exist'",
    "exits": "1.1 failed: SystemExit: 3",
    "other_api": "2.0 failed: PluginError: it declares hook API 2, this moe-core speaks 1; install a newer moe-core or "
    "an older plugin",
    "twin": "1.0 conflict: PluginConflictError: plugin name 'twin' is claimed by 'twin' (twin-a 1.0, entry point "
    "twin_a_plugin) and 'twin' (twin-b 1.0, entry point twin_b_plugin); none is used. Uninstall all but one",
    "wrong_hook": "1.0 failed: UnknownNameError: unknown hook 'fused_expert'; did you mean 'fused_experts'? Known: "
    "declare_backends, fused_experts, process_weights_after_loading, select_dispatcher, select_output_dtype.",
    "raises": "1.0 failed: RuntimeError: no device found",
    "invalid": "1.0 failed: SpecError: Requirement 'x', field 'minimum': Invalid version: 'newest'",
    "slow": "1.0 ready",
    "prints": "1.0 ready",
}
WARNINGS = (
    r"warning: importing plugin 'slow' (slow-import 1.0, entry point slow_import_plugin) took 2.* s; everything heavy "
    "belongs inside its other hooks",
    r"warning: importing plugin 'prints' (prints-on-import 1.0, entry point prints_on_import_plugin) printed "
    r"'welcome to prints\n'",
)


@pytest.fixture(scope="module")
def listed(moe_core):
    # Wide enough for the longest line.
    return moe_core("list-backends", "--no-probe", sites=("broken", "faulty"), COLUMNS="400")


def _status_lines(listed):
    """The table of plugins; that of their variants has nothing of one that failed."""
    plugins, variants = listed.stdout.split("\n\n")
    variants, _, allowed = variants.partition("plugins that are loaded: only ")
    assert not any(name in variants for name in LINES)
    assert all(name in allowed for name in LINES)
    return plugins.splitlines()


@pytest.mark.parametrize("name", LINES)
def test_the_line_of_a_faulty_plugin(listed, name):
    lines = [line for line in _status_lines(listed) if line.split()[:1] == [name]]
    assert len(lines) == (2 if name == "twin" else 1)
    version, status = LINES[name].split(maxsplit=1)
    for line in lines:
        assert " ".join(line.split()) == f"{name} {version} - {status}"


def test_the_others_are_not_touched(listed):
    (line,) = [line for line in _status_lines(listed) if line.startswith("torch ")]
    assert line.split()[-1] == "ready"
    assert listed.returncode == 0


def test_what_is_no_failure_is_a_warning(listed):
    lines = " ".join(listed.stderr.split())
    for warning in WARNINGS:
        before, _, after = warning.partition("2.*")
        assert before in lines
        assert after in lines
    assert lines.count("warning:") == len(WARNINGS)
