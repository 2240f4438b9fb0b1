"""Where kernels are launched: on their tensors' device, without a change where it is the current one."""

from __future__ import annotations

import contextlib

import pytest
import torch

from moe_core.kernels.on_device import launching_on, on_device


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that are made current, in a process whose current one is the GPU 0."""
    devices: list[torch.device] = []

    def make_current(device: torch.device) -> contextlib.AbstractContextManager[None]:
        devices.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", make_current)
    return devices


@pytest.mark.parametrize(("name", "is_entered"), [("cuda:0", False), ("cuda:1", True), ("cpu", False)])
def test_only_another_gpu_is_made_current(entered: list[torch.device], name: str, is_entered: bool) -> None:
    device, tokens = torch.device(name), torch.ones(2)
    with on_device(device):
        pass
    assert entered == [device] * is_entered
    assert launching_on(device, torch.add)(tokens, tokens).tolist() == [2.0, 2.0]
    assert entered == [device] * 2 * is_entered


def test_a_cpu_gets_the_function_itself() -> None:
    assert launching_on(torch.device("cpu"), torch.add) is torch.add
