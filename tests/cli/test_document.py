"""What a command prints with `--json` is one document, whatever plugins, libraries and processes print."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.error_path

RESOLVE = ("resolve", "--environment", "cpu")
PRINTED = ("by Python", "below Python", "by a child", "by C")


def test_whatever_else_is_printed_goes_to_stderr(moe_core):
    result = moe_core(*RESOLVE, "--json", sites=("printing",))
    assert json.loads(result.stdout)["feasible"]
    lines = (*PRINTED, "at the end")
    assert sorted(result.stderr.splitlines()) == sorted(f"printed {line}" for line in lines)


def test_without_a_document_it_stays_where_it_was_printed(moe_core):
    result = moe_core(*RESOLVE, sites=("printing",))
    assert result.stdout.count("printed ") == len(PRINTED) + 1
    assert result.stderr == ""


def test_a_program_that_calls_commands_has_its_stdout_back(python):
    code = """
import os
from moe_core.cli import main
for words in (["resolve", "--environment", "cpu", "--json"], ["resolve", "--environment", "nowhere", "--json"]):
    try:
        main(words)
    except SystemExit as ended:
        print("ended with", ended.code, flush=True)
os.write(1, b"below\\n")
"""
    result = python(code, sites=("printing",))
    document, _, rest = result.stdout.partition("ended with")
    assert json.loads(document)["feasible"]
    assert rest == " 0\nended with 2\nbelow\nprinted at the end\n"
    assert [f"printed {line}" in result.stderr.splitlines() for line in PRINTED] == [True] * 4


def test_a_stdout_that_was_replaced_gets_the_document_alone(call, monkeypatch):
    monkeypatch.setattr("moe_core.cli.resolve._resolved", _printing(monkeypatch))
    code, out, err = call(*RESOLVE, "--json")
    assert (code, json.loads(out)["feasible"]) == (0, True)
    assert err.startswith("a print\n")


def _printing(monkeypatch):
    from moe_core.cli import resolve

    usual = resolve._resolved

    def resolved(*arguments):
        print("a print")
        return usual(*arguments)

    return resolved


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/null"])
def test_what_nobody_can_read_is_lost_and_the_document_is_not(python, closed):
    words = " ".join(RESOLVE)
    result = python(
        "import subprocess, sys\n"
        f"command = f'{{sys.executable}} -m moe_core {words} --json {closed}'\n"
        "raise SystemExit(subprocess.run(command, shell=True).returncode)",
        sites=("printing",),
    )
    assert json.loads(result.stdout)["feasible"]
