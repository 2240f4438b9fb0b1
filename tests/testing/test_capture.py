"""Captured forwards on a CPU: what a replay does again, what it cannot do, and what it cannot see."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from moe_core.testing import ConformanceError, NotRun
from moe_core.testing.capture import emulated_graph

Tensor = torch.Tensor
Tokens = tuple[Tensor, Tensor, Tensor]


def _tokens(seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(4, 8, generator=generator)
    return hidden, torch.randint(0, 3, (4, 2), generator=generator), torch.rand(4, 2, generator=generator)


def _weighted(tokens: Tokens) -> Tensor:
    """Views, fresh memory, work in place, and a result that is a view itself."""
    hidden, ids, weights = tokens
    out = torch.empty(hidden.shape[0] + 1, hidden.shape[1])[1:]
    out.zero_()
    for slot in range(ids.shape[1]):
        out.view(-1).add_((hidden * weights[:, slot, None] * (ids[:, slot, None] + 1)).view(-1))
    return out.T.contiguous().T


def test_a_replay_takes_what_lies_in_the_memory_of_the_inputs() -> None:
    tokens = _tokens(0)
    replay = emulated_graph(_weighted, tokens, _tokens(1))
    for seed in (2, 3, 0):
        for target, source in zip(tokens, _tokens(seed), strict=True):
            target.copy_(source)
        assert torch.equal(replay(), _weighted(_tokens(seed)))


def test_a_workspace_may_be_used_again() -> None:
    workspace = torch.empty(4, 8)
    tokens = _tokens(0)
    replay = emulated_graph(lambda given: workspace.zero_().add_(given[0]), tokens, _tokens(1))
    tokens[0].fill_(2.0)
    assert torch.equal(replay(), tokens[0])
    assert torch.equal(workspace, tokens[0])


def test_checks_on_the_host_are_left_out_as_under_compilation() -> None:
    def checked(tokens: Tokens) -> Tensor:
        if not torch.compiler.is_compiling() and int(tokens[1].max()) > 5:
            raise ValueError
        return tokens[0] * 2.0

    emulated_graph(checked, _tokens(0), _tokens(1))
    assert not torch.compiler.is_compiling()


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (lambda t: t[0] * float(t[2].sum()), r"aten\._local_scalar_dense reads data on the host, <lambda> \(test_cap"),
        (lambda t: t[0] * t[2].tolist()[0][0], "Tensor.tolist reads data on the host"),
        (lambda t: t[0] * float(t[2].numpy()[0, 0]), "Tensor.numpy reads data on the host"),
        (lambda t: t[0] if (t[1] > 0).any() else -t[0], "aten._local_scalar_dense reads data on the host"),
        (lambda t: t[0][t[1][:, 0] > 0], "aten.index with a mask has a shape that depends on data"),
        (lambda t: t[0][torch.where(t[1][:, 0] > 0)], "aten.nonzero has a shape that depends on data"),
        (lambda t: t[0] * torch.tensor([2.0] * 8), "aten.lift_fresh makes a tensor of Python values"),
    ],
)
def test_what_a_graph_cannot_hold(forward: Callable[[Tokens], Tensor], says: str) -> None:
    with pytest.raises(ConformanceError, match=says):
        emulated_graph(forward, _tokens(0), _tokens(1))


def _read_by_address(tensor: Tensor) -> float:
    return ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))[0]


def test_work_that_depends_on_data_shows_whoever_read_it() -> None:
    with pytest.raises(ConformanceError, match=r"what is done depends on data: .*aten\.mul\.Tensor"):
        emulated_graph(lambda tokens: tokens[0] * _read_by_address(tokens[2]), _tokens(0), _tokens(1))


def test_kernels_that_torch_does_not_see_are_not_passed() -> None:
    def foreign(tokens: Tokens) -> Tensor:
        out = torch.empty_like(tokens[0])
        ctypes.memmove(out.data_ptr(), tokens[0].data_ptr(), out.numel() * 4)
        return out

    with pytest.raises(NotRun, match="past torch's dispatcher"):
        emulated_graph(foreign, _tokens(0), _tokens(1))
