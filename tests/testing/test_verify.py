"""`moe-core verify`: its table, its JSON and JUnit documents, and its exit codes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import toy_backend as toy
from rich.console import Console
from wrong_backends import FAKES

from moe_core.backends.torch import plugin as torch_plugin
from moe_core.cli import main, verify
from moe_core.cli.verify_report import Report, view
from moe_core.manager import BackendManager
from moe_core.probing import probe_environment
from moe_core.testing.outcome import FAILED, NOT_RUN, PASSED, Result

pytestmark = pytest.mark.error_path
Call = Callable[..., tuple[int, str, str]]


def _raise(*arguments: object) -> None:
    raise ValueError("\n".join(["no kernel", *(f"line {number}" for number in range(1000))]))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command with a right backend, a wrong one, and one for another machine."""
    manager = BackendManager()
    manager.register("torch", torch_plugin)
    manager.register("right", toy.make_plugin("right"))
    manager.register("wrong", FAKES["swapped_halves"].module("wrong"))
    manager.register("elsewhere", toy.make_plugin("elsewhere", toy.Parts(runner={"devices": ("npu",)})))
    manager.register("raises", toy.make_plugin("raises", toy.Parts(bind=_raise)))
    monkeypatch.setattr(verify, "default_manager", lambda: manager)
    monkeypatch.setenv("COLUMNS", "200")

    def _call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["verify", "--device", "cpu", *words])
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return _call


def test_a_right_backend(call: Call) -> None:
    code, out, err = call("right")
    assert code == 0
    first, declared, total, plugin, *pairs = err.splitlines()
    assert first == "reading what right declares ..."
    assert declared.startswith("reading what right declares: ")
    assert re.fullmatch(r"right: \d+ checks", total)
    assert plugin.startswith("right: 3 passed, 0 failed, 1 not run, ")
    assert ": 0 passed" not in pairs[0]
    assert len({line.partition(": ")[0] for line in pairs}) == len(pairs)
    assert "right: passed (" in out
    assert "0 failed, 1 not run" in out
    assert "torch:none.standard + right:toy.standard" in out


def test_a_wrong_backend(call: Call, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    code, out, _ = call("wrong", "right", "--json", "--junit", str(report))
    assert code == 1
    document = json.loads(out)
    wrong, right = document["backends"]
    assert (document["schema"], wrong["status"], right["status"]) == (1, "failed", "passed")
    failed = [result for result in wrong["results"] if result["status"] == "failed"]
    assert len(failed) == wrong["counts"]["failed"]
    assert any(r["check"] == "gate_up_order" and "swapped" in r["text"] for r in failed)
    assert wrong["environment"]["device_type"] == "cpu"
    first, second = ElementTree.parse(report).getroot()
    assert (first.get("name"), first.get("failures")) == ("wrong", str(len(failed)))
    assert (second.get("failures"), second.get("skipped")) == ("0", "1")
    assert len(first.findall("testcase/failure")) == len(failed)


def test_failures_are_listed_with_what_they_look_like(call: Call) -> None:
    code, out, _ = call("wrong")
    assert code == 1
    assert "failed gate_up_order" in out
    assert "the gate and up rows of w13 are swapped" in out


def test_only_the_first_line_of_a_failure_is_shown_unless_asked(call: Call) -> None:
    _, out, _ = call("raises")
    assert "ValueError: no kernel ..." in out
    assert "line 999" not in out
    assert "Traceback" not in out
    _, out, _ = call("raises", "-v")
    assert "line 999" in out
    assert "Traceback" in out


def _printed(*results: Result, verbose: bool = False) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(view(Report("a", probe_environment((), "cpu"), results, 61.4), verbose))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def _failed(check: str, subject: str, text: str) -> Result:
    return Result(check=check, subject=subject, status=FAILED, text=text, traceback=f"trace of {subject}")


#: A plugin that lacks one thing fails in it wherever it is looked at.
ALIKE = (
    _failed("answer", "a + b, bf16", "no kernel\nat all"),
    _failed("answer", "a + b, fp16", "too large"),
    _failed("answer", "a + b, fp32", "no kernel\nat all"),
    _failed("reload", "a + b, bf16", "no kernel"),
    _failed("inputs", "a + b, bf16", "no kernel\nat all"),
    Result(check="inputs", subject="a + b, fp32", status=PASSED),
)


def test_checks_that_fail_alike_are_told_once() -> None:
    text = _printed(*ALIKE)
    assert "failed answer a + b, bf16\nno kernel ... (and 3 more: -v)\nlikewise inputs\n" in text
    assert "failed reload a + b, bf16\nno kernel\n" in f"{text}\n"
    assert "trace" not in text


def test_equal_failures_of_a_check_share_a_text_where_all_are_shown() -> None:
    text = _printed(*ALIKE, verbose=True)
    first = "failed answer a + b, bf16\na + b, fp32\nno kernel\nat all\ntrace of a + b, bf16\n"
    second = "failed answer a + b, fp16\ntoo large\ntrace of a + b, fp16\n"
    assert f"{first}{second}failed reload " in text
    assert text.count("no kernel") == 3
    assert text.endswith("passed inputs a + b, fp32")


_WRONG = "five tokens: relative error {}, at most {} is due to rounding{}"


def test_equal_deviations_are_told_once_with_their_range() -> None:
    halves = "; it is what comes out if halves are swapped"
    found = [
        _failed("answer", "a + b, int8", _WRONG.format("0.52", "0.0051", halves)),
        _failed("answer", "a + b, fp8", _WRONG.format("0.31", "0.0051", halves)),
        _failed("answer", "a + b, bf16", _WRONG.format("1.2e+03", "0.02", "")),
        _failed("reload", "a + b, fp8", _WRONG.format("0.33", "0.0051", halves)),
        _failed("routing", "a + b, int8", "relative error 0.3 in tokens 0, 2 and 5 more"),
        _failed("routing", "a + b, fp8", "relative error 0.3 in tokens 1"),
    ]
    everything = _printed(*found, verbose=True)
    swapped = f"{_WRONG.format('0.31 to 0.52', '0.0051', halves)}\ntrace of a + b, int8"
    assert f"failed answer a + b, int8\na + b, fp8\n{swapped}\nfailed answer a + b, bf16\n" in everything
    assert "a + b, fp8\nrelative error 0.3 in tokens 0, 2 and 5 more (or others)\n" in everything
    brief = _printed(*found)
    assert f"{_WRONG.format('0.52', '0.0051', halves)} (and 3 more: -v)\nlikewise reload\n" in brief
    # What is no number tells texts apart, digits in names as well.
    for word in ("int8", "int4"):
        assert f"no kernel for {word}\n" in _printed(
            *(_failed("answer", f"a + b, {name}", f"no kernel for {name}") for name in ("int8", "int4")), verbose=True
        )


def test_a_row_says_why_some_of_its_cases_were_not_run() -> None:
    def result(status: str, text: str) -> Result:
        return Result(check="answer", subject="a + b, bf16", status=status, text=text)

    some = [result(PASSED, ""), result(NOT_RUN, "no GPU\nat all"), result(NOT_RUN, "too large")]
    for results, why in ((some[:1], ""), (some[:2], "no GPU ..."), (some, "no GPU ... (1 of 2)")):
        console = Console(file=io.StringIO(), width=200)
        console.print(view(Report("a", probe_environment((), "cpu"), tuple(results), 61.4), verbose=False))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "not run, 61 s)" in text
        (row,) = [line for line in text.splitlines() if line.startswith("a + b")]
        assert row.rstrip().endswith(why or "-")


def test_a_backend_for_another_machine_did_not_run(call: Call) -> None:
    code, out, _ = call("elsewhere")
    assert code == 1
    assert "elsewhere: not run" in out
    assert "device: needs npu, found cpu" in out


def test_unknown_names_and_folders_are_wrong_usage(call: Call, tmp_path: Path) -> None:
    assert call("rihgt")[0] == 2
    code, _, err = call("right", "--junit", str(tmp_path / "none" / "report.xml"))
    assert code == 2
    assert "does not exist" in err
    # Before minutes of checks.
    code, _, err = call("right", "--junit", str(tmp_path))
    assert (code, err) == (2, f"error: --junit: {tmp_path} is there and is no regular file\n")
