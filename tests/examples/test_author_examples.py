"""The examples for authors and for people without the machine run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_core.testing import Kit

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_policy_changes_the_route_of_few_tokens_alone() -> None:
    before, after = _run("examples/policy_plugin.py").split("with the policy:")
    assert "decode: torch:none.standard" in before
    assert "prefill: torch:none.standard" in after
    assert "decode: torch:none.masked + torch:torch.masked" in after


def test_the_policy_passes_the_conformance_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    results = {case.check: case.run() for case in Kit("policy_plugin", device="cpu").cases()}
    assert {check for check, result in results.items() if result.status == "passed"} == {
        "import",
        "signatures",
        "foreign_plans",
    }
    assert results["specs"].text == "a policy declares nothing"


@pytest.mark.parametrize(("machine", "says"), [((), "environment: cuda sm90 (by hand)"), (("cpu",), "preset cpu")])
def test_the_explanation_for_another_machine_needs_no_torch(machine: tuple[str, ...], says: str) -> None:
    text = _run("examples/explain_for_another_machine.py", *machine)
    assert says in text
    assert "torch:torch_alltoall.standard + torch:torch.standard" in text
    assert "something imported torch" not in text
