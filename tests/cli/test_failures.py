"""How commands end that meet an error of a plugin's functions, which run in every forward."""

from __future__ import annotations

import pytest

from moe_core.cli.failures import failure

pytest.importorskip("transformers")
pytestmark = [pytest.mark.error_path, pytest.mark.usefixtures("with_failing")]

PLUGIN = "plugin 'fails' (fails-in-forward 1.0, entry point fails_in_forward_plugin)"
RAN = "<PreparedExperts any: fails:fails.fused, fp32 by runner>"
FORWARD = "in the forward of fails:fails.fused"
FUNCTION = f"{PLUGIN}, function fails_in_forward_plugin.fused_experts.<locals>.experts, {FORWARD}"
EXPECTED = f"error: {RAN}: expected [2, 32] float32 on cpu as the tokens are,"
ADVICE = f"of {PLUGIN}; moe-core verify fails tells what is wrong there, and another runner_backend runs without it"


def _run(call, folder, *words):
    command = ("run", "--model", str(folder), "--prompt", "a", "--device", "cpu", "--no-compare-eager")
    return call(*command, "--dtype", "fp32", *words)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", f"error: ValueError: no such tile\nraised by {FUNCTION}\nthe traceback: -v\n"),
        ("library", f"must be Tensor, not NoneType\nraised {FORWARD}\nthe traceback: -v\n"),
        ("memory", f"a smaller or quantized model, or another device\nraised by {FUNCTION}\n"),
        ("exit", f"error: {FUNCTION}: SystemExit: 3\n"),
        ("hook", f"error: no such tile\nraised by {PLUGIN}, hook fused_experts\n"),
        ("own", f"error: no such tile\nraised by {FUNCTION}\n"),
        ("shape", f"{EXPECTED} got [2, 31] float32 on cpu, {ADVICE}\n"),
        ("none", f"{EXPECTED} got NoneType, {ADVICE}\n"),
        ("dtype", f"{EXPECTED} got [2, 32] float64 on cpu, {ADVICE}\n"),
        ("device", f"{EXPECTED} got [2, 32] float32 on meta, {ADVICE}\n"),
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
    assert err.endswith(f"error: ValueError: no such tile\nraised by {FUNCTION}\nthe traceback: -v\n")


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
    assert failure(ValueError("nowhere")) == ""
