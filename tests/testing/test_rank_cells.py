"""How many ranks the kit starts, how much room their layers have, and what runs on ranks that write to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import toy_backend as toy
from fakes import dispatcher, runner

from moe_core.declared import Candidate, DeclaredDispatcher, DeclaredRunner
from moe_core.environment import load_environment
from moe_core.specs import Limit
from moe_core.testing import Case, Kit
from moe_core.testing.cells import cells_of
from moe_core.testing.checks import ranks
from moe_core.testing.outcome import NOT_RUN, PASSED
from moe_core.testing.sizes import odd_sizes

TRITON = "moe_core.backends.triton.plugin"
Started = list[dict[str, Any]]


def _cases(device: str) -> list[Case]:
    """The checks of a layer whose ranks write into each other's memory, with the runner of the same format."""
    cases = Kit(TRITON, environment=load_environment("h100"), device=device, quick=True).cases()
    named = [case for case in cases if "peer_memory" in case.subject and "triton:triton" in case.subject]
    return [case for case in named if case.check == "distributed_ranks"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What would be started on ranks; none of them answers."""
    found: Started = []

    def run_on_ranks(job: Callable[..., Any], per_rank: list[Any], backend: str, seconds: float) -> list[Any]:
        layers = per_rank[0][-1]
        rooms = [layer_sizes.max_tokens for _, layer_sizes, _ in layers]
        found.append({"size": len(per_rank), "backend": backend, "rooms": rooms, "seconds": seconds})
        raise TimeoutError("nobody is there")

    monkeypatch.setattr(ranks, "run_on_ranks", run_on_ranks)
    return found


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_devices_are_said(count: int, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    results = [case.run() for case in _cases("cuda")]
    assert len(results) == 4
    assert {(result.status, result.text) for result in results} == {
        (NOT_RUN, f"2 ranks need as many devices, found {count}")
    }
    assert started == []


@pytest.mark.parametrize(("count", "size"), [(2, 2), (3, 3), (8, 3)])
def test_as_many_ranks_as_there_are_devices(
    count: int, size: int, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    result = _cases("cuda")[0].run()
    assert result.text == f"{size} ranks, one without tokens, hang: nobody is there"
    (found,) = started
    assert (found["size"], found["backend"]) == (size, "nccl")
    # As much room as is declared, once.
    first, *others = found["rooms"]
    assert (first, set(others)) == (8192, {8})
    # Every layer may have kernels to compile.
    assert found["seconds"] > 10 * len(found["rooms"])


def test_emulated_ranks_have_little_room(started: Started) -> None:
    _cases("cpu")[0].run()
    assert (started[0]["size"], started[0]["backend"], set(started[0]["rooms"])) == (3, "gloo", {8})


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted beside a GPU")
def test_interpreted_ranks_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton")
    layers = ranks._layers
    # One layer is enough to see ranks start and answer; `moe-core verify` runs all of them in every format.
    monkeypatch.setattr(ranks, "_layers", lambda *arguments: layers(*arguments)[:1])
    monkeypatch.setattr(ranks, "GROUP_SIZES", (2,))
    (result,) = (case.run() for case in _cases("cpu") if "contiguous" in case.subject)
    assert (result.status, result.text) == (PASSED, "")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_of_a_gpu_each_answer() -> None:
    results = [case.run() for case in _cases("cuda")]
    assert [(result.subject, result.text) for result in results if result.status != PASSED] == []


def _sender(**fields: Any) -> Candidate:
    sender = dispatcher(needs_max_tokens=True, **fields)
    return Candidate(DeclaredDispatcher("toy", sender), DeclaredRunner("toy", runner()))


def test_a_bound_for_who_needs_one() -> None:
    (cell, *_) = cells_of(_sender())
    sizes = [cell.base_sizes(), *odd_sizes(cell.quant, cell.limits)]
    assert {each.max_tokens for each in sizes} == {512}
    assert cell.request(sizes[0]).workloads[0].max_tokens == 512
    (cell, *_) = cells_of(_sender(limits=(Limit("max_tokens", "<=", 1000),)))
    assert cell.base_sizes().max_tokens == 1000


def test_a_plugin_that_needs_a_bound_passes() -> None:
    module = toy.make_plugin("bounded", toy.Parts("contiguous"))
    spec = module.declare_backends()
    (own,) = spec.dispatchers
    bounded = attrs.evolve(spec, dispatchers=(attrs.evolve(own, needs_max_tokens=True),))
    hooks = {"declare_backends": lambda: bounded}
    kit = Kit(toy.make_plugin("bounded", toy.Parts("contiguous", hooks=hooks)), device="cpu", quick=True)
    checks = ("answer", "row_counts", "batch_sizes", "odd_sizes", "dispatched_form")
    results = [case.run() for case in kit.cases() if case.check in checks]
    assert {result.check for result in results} == set(checks)
    assert {result.status for result in results} == {PASSED}
