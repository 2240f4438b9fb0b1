"""Every check can fail: a wrong backend for each, caught by the check made for it, which names the cause."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import toy_backend as toy
from captured_backends import graph_safe
from matrix import IN_FILES, NAMES, TABLE, row
from wrong_backends import FAKES

from moe_core.quant import BF16, W8A8_INT8
from moe_core.testing import CHECKS, Kit
from moe_core.testing.outcome import PASSED


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """One of the wrong backends leaves a variable behind."""
    yield
    os.environ.pop("TOY_MODE", None)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_backend_is_caught_and_the_cause_is_named(name: str) -> None:
    found = row(name)
    assert any(found.says in text for text in found.failed.get(found.check, ())), found.failed
    assert str(found) in TABLE.read_text(encoding="utf-8").splitlines(), "run tests/testing/matrix.py"


def test_every_check_has_a_wrong_backend() -> None:
    made_for = {fake.check for fake in FAKES.values()} | {check for check, _ in IN_FILES.values()}
    assert made_for == set(CHECKS)


@pytest.mark.parametrize(
    "parts",
    [
        toy.Parts(),
        toy.Parts(format="contiguous"),
        toy.Parts(format="masked"),
        toy.Parts(format="fused"),
        toy.Parts(scheme=W8A8_INT8),
        toy.Parts(scheme=toy.STATIC_INT8),
        graph_safe(),
    ],
    ids=["standard", "contiguous", "masked", "fused", "int8", "static-int8", "graph-safe"],
)
def test_a_right_backend_passes_everything_that_can_run(parts: toy.Parts) -> None:
    results = [case.run() for case in Kit(toy.make_plugin("toy", parts), device="cpu", quick=True).cases()]
    # A module without a file cannot be imported elsewhere; integers have no NaN, and a fixed scale has no outliers.
    not_run = {"import"} if parts.scheme == BF16 else {"import", "idle_experts"}
    not_run |= {"activation_rounding"} if parts.scheme == toy.STATIC_INT8 else set()
    assert {result.check for result in results if result.status != PASSED} == not_run
    assert len(results) > 35
