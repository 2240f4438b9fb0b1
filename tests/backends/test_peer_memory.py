"""Ranks that write into each other's memory: values, what differs between ranks, buffers, and what is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from layers import exact, random_tensors, random_tokens
from ranks import RankError, run_on_ranks
from reference_moe import rel
from triton_layers import both_manager

from moe_core import ExpertPlacement, LayerRequest, Workload, make_plan
from moe_core.environment import load_environment
from moe_core.errors import PluginError, ResolutionError
from moe_core.quant import FP16

pytest.importorskip("triton", reason="needs triton")
import peer_layers

from moe_core.kernels.triton.peer.buffer import PeerBuffer
from moe_core.kernels.triton.peer.memory import shared_memory

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks of a CPU need the interpreter; see *_cuda")

LAYER = LayerRequest(
    num_experts=7,
    top_k=3,
    hidden_size=48,
    intermediate_size=32,
    ep_size=2,
    a2a_backend="peer_memory.standard",
    runner_backend="torch",
    workloads=(Workload(max_tokens=9),),
)
#: A sum is rounded on each rank and then as a whole, on top of what one rank rounds.
TOLERANCE = 1.5e-2


def _forwards(request: LayerRequest, counts: tuple[int, ...], rank: int) -> list[tuple[torch.Tensor, ...]]:
    return [random_tokens(request, count, seed=10 * step + rank) for step, count in enumerate(counts)]


def _check(request: LayerRequest, *counts: tuple[int, ...]) -> None:
    """The values of all ranks, whose forwards have so many tokens."""
    _check_job(peer_layers.outputs, request, *counts)


def _check_job(job: Callable[..., torch.Tensor], request: LayerRequest, *counts: tuple[int, ...]) -> None:
    tensors = random_tensors(request)
    forwards = [_forwards(request, own, rank) for rank, own in enumerate(counts)]
    for rank, output in enumerate(run_on_ranks(job, [(request, tensors, own) for own in forwards])):
        assert isinstance(output, torch.Tensor), output
        want = torch.cat([exact(request, tensors, tokens) for tokens in forwards[rank]])
        assert output.shape == want.shape
        assert rel(output, want) < TOLERANCE or not want.numel()


def test_forwards_of_uneven_and_no_tokens_behind_each_other() -> None:
    # All the room there is, no token on one rank, on both, and on the other.
    _check(LAYER, (9, 0, 0, 2), (1, 3, 0, 0))


@pytest.mark.parametrize("mode", ["contiguous", "masked"])
def test_tokens_grouped_or_in_blocks(mode: str) -> None:
    request = attrs.evolve(LAYER, a2a_backend=f"peer_memory.{mode}")
    tensors, ids = random_tensors(request), [torch.rand(5, 7).topk(3).indices for _ in range(2)]
    tokens = [(random_tokens(request, 5, rank)[0], ids[rank], torch.rand(5, 3)) for rank in range(2)]
    outputs = run_on_ranks(peer_layers.outputs, [(request, tensors, [own]) for own in tokens])
    for output, own in zip(outputs, tokens, strict=True):
        assert isinstance(output, torch.Tensor), output
        assert rel(output, exact(request, tensors, own)) < TOLERANCE


def test_kernels_of_the_same_plugin_behind_it_on_three_ranks() -> None:
    _check(attrs.evolve(LAYER, ep_size=3, runner_backend="triton"), (3, 0), (2, 1), (0, 1))


def test_experts_that_stand_in_several_slots() -> None:
    placement = ExpertPlacement("map", (2, 5, 0, 1, 2, 6, 4, 3, 5))
    _check(attrs.evolve(LAYER, placement=placement), (4,), (6,))


def test_weights_on_the_input_in_half_precision() -> None:
    _check(attrs.evolve(LAYER, weight_on_input=True, dtype="fp16", quant=FP16), (4,), (6,))


def test_rows_longer_than_a_program_moves_at_a_time() -> None:
    _check(attrs.evolve(LAYER, hidden_size=4 * 2048 + 16), (2,), (3,))


def test_sums_of_many_tokens_come_piece_by_piece() -> None:
    # Five pieces, of which some ranks have none, a part, or all.
    _check_job(peer_layers.outputs_in_pieces, LAYER, (9, 1), (3, 0))


def test_something_that_runs_meanwhile() -> None:
    tokens = [random_tokens(LAYER, 5, seed) for seed in range(2)]
    tensors = random_tensors(LAYER)
    assert run_on_ranks(peer_layers.overlapped, [(LAYER, tensors, own) for own in tokens]) == [True, True]


def test_layers_of_one_geometry_and_of_another_in_turns() -> None:
    requests = [LAYER, attrs.evolve(LAYER, weight_on_input=True), attrs.evolve(LAYER, workloads=Workload(max_tokens=4))]
    tensors = random_tensors(LAYER)
    tokens = [[random_tokens(request, 4, 3 * rank + at) for at, request in enumerate(requests)] for rank in range(2)]
    for own, output in zip(
        tokens, run_on_ranks(peer_layers.two_layers, [(requests, tensors, own) for own in tokens]), strict=True
    ):
        assert isinstance(output, torch.Tensor), output
        answers = [exact(request, tensors, its) for request, its in zip(requests, own, strict=True)]
        assert rel(output, torch.cat(2 * answers)) < TOLERANCE


def test_a_plan_says_what_it_takes() -> None:
    environment, manager = load_environment("h100"), both_manager()

    def reasons(**fields: object) -> str:
        with pytest.raises(ResolutionError) as error:
            make_plan(manager, attrs.evolve(LAYER, **fields), environment)
        return str(error.value)

    assert "limit: needs max_tokens, found any number of tokens; declare Workload(max_tokens=...)" in reasons(
        workloads=(Workload(),)
    )
    assert "needs ep_size in (2, 3, 4, 5, 6, 7, 8), found ep_size 9" in reasons(ep_size=9, num_experts=9)
    assert "needs max_tokens <= 8192" in reasons(workloads=(Workload(max_tokens=8193),))
    with pytest.raises(ResolutionError, match="needs sm90"):
        make_plan(manager, LAYER, load_environment("b200"))


@pytest.mark.error_path
def test_tokens_that_a_rank_refuses() -> None:
    tokens = random_tokens(LAYER, 10)
    errors = run_on_ranks(peer_layers.outputs, [(LAYER, random_tensors(LAYER), [tokens])] * 2)
    assert all(
        isinstance(error, RankError)
        and "10 tokens on this rank, the route for phase 'any' takes at most 9" in error.text
        for error in errors
    )
    hidden, ids, weights = random_tokens(LAYER, 2)
    ids[1, 2] = 7
    errors = run_on_ranks(peer_layers.outputs, [(LAYER, random_tensors(LAYER), [(hidden, ids, weights)])] * 2)
    assert all(isinstance(error, RankError) and "expert id 7 is out of range" in error.text for error in errors)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no memory", "rank 1: no memory for you"),
        # Whatever is raised, where the others would wait.
        ("no library", "rank 1: RuntimeError: no library for you"),
        ("no room", "rank 1: RuntimeError: no room for you"),
        ("no compiler", "rank 1: RuntimeError: no compiler for you"),
        ("no way", "rank 1: no way to you"),
        ("nothing arrives", "rank 0: what ranks [1] wrote did not arrive"),
    ],
)
def test_every_rank_gives_up_where_one_cannot_reach_another(fault: str, text: str) -> None:
    found = run_on_ranks(peer_layers.with_fault, [(LAYER, random_tensors(LAYER), fault)] * 2)
    for error, files in found:
        assert text in error
        assert "pin a2a_backend='torch_alltoall'" in error
        assert files == []


@pytest.mark.error_path
def test_a_forward_that_was_left_midway_is_not_taken_for_the_next() -> None:
    jobs = [(LAYER, random_tensors(LAYER), random_tokens(LAYER, 4, rank)) for rank in range(2)]
    for said, distances in run_on_ranks(peer_layers.left_midway, jobs):
        raised, own, others = said
        assert raised == "no memory for you"
        assert "was left between dispatch and combine" in own
        assert own == others
        assert distances == [0.0, 0.0]


@pytest.mark.error_path
def test_a_capture_cannot_look_whether_a_forward_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = dict.fromkeys(field.name for field in attrs.fields(PeerBuffer))
    fields |= {"own": SimpleNamespace(device=torch.device("cuda")), "is_open": True}
    buffer: Any = PeerBuffer(**fields)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(PluginError, match="run a forward on all ranks before the next capture"):
        buffer.begin()
    buffer.end()
    buffer.begin()
    assert buffer.is_open


@pytest.mark.error_path
def test_a_file_that_cannot_be_mapped_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("no room for you")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch, "from_file", refuse)
    with pytest.raises(OSError, match="no room for you"):
        shared_memory(64, torch.device("cpu"))
    assert list(tmp_path.iterdir()) == []


def test_memory_goes_when_no_rank_uses_it() -> None:
    requests = [LAYER, attrs.evolve(LAYER, workloads=Workload(max_tokens=4))]
    assert run_on_ranks(peer_layers.freed, [(requests, random_tensors(LAYER))] * 2) == [(0, 2), (0, 2)]
