"""How commands end that meet an error of a plugin's functions, which run in every forward."""

from __future__ import annotations

import pytest

from moe_core.cli.failures import failure
from moe_core.manager import default_manager

pytest.importorskip("transformers")
pytestmark = [pytest.mark.error_path, pytest.mark.usefixtures("with_failing")]

PLUGIN = "plugin 'fails' (fails-in-forward 1.0, entry point fails_in_forward_plugin)"
FUNCTION = f"error: {PLUGIN}, function fails_in_forward_plugin.fused_experts.<locals>.experts"
RAN = "<PreparedExperts any: fails:fails.fused, fp32 by runner>"


def _run(call, folder, *words):
    command = ("run", "--model", str(folder), "--prompt", "a", "--device", "cpu", "--no-compare-eager")
    return call(*command, "--dtype", "fp32", *words)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", f"{FUNCTION}: ValueError: no such tile\nthe traceback: -v\n"),
        ("exit", f"{FUNCTION}: SystemExit: 3\nthe traceback: -v\n"),
        ("hook", f"error: no such tile\nraised by {PLUGIN}, hook fused_experts\n"),
        ("shape", f"error: {RAN}: expected a tensor of shape [2, 32], got shape [2, 31]\n"),
        ("none", f"error: {RAN}: expected a tensor of shape [2, 32], got NoneType\n"),
        ("wrong", f"for this model\nor {RAN} is wrong, which moe-core verify would tell\n"),
    ],
)
def test_a_faulty_plugin_is_named_without_a_traceback(call, folder, monkeypatch, how, said):
    monkeypatch.setenv("FAILS", how)
    code, _, err = _run(call, folder)
    assert (code, "Traceback" in err) == (1, False)
    assert err.endswith(said)


def test_the_traceback_is_there_where_it_is_asked_for(call, folder, monkeypatch):
    monkeypatch.setenv("FAILS", "raise")
    code, _, err = _run(call, folder, "-v")
    assert code == 1
    assert 'raise ValueError("no such tile")' in err
    assert err.endswith(f"{FUNCTION}: ValueError: no such tile\nthe traceback: -v\n")


def test_an_interrupt_among_other_exceptions_is_an_interrupt(call, folder, monkeypatch):
    monkeypatch.setenv("FAILS", "interrupt")
    code, _, err = _run(call, folder)
    assert (code, "Traceback" in err) == (130, False)


def test_a_fault_of_this_program_keeps_its_traceback(call, monkeypatch):
    def broken(*arguments, **options):
        raise ValueError("a fault")

    monkeypatch.setattr("moe_core.cli.resolve.requested_groups", broken)
    with pytest.raises(ValueError, match="a fault"):
        call("resolve", "--environment", "cpu")
    default_manager()
    assert failure(ValueError("nowhere")) == ""
