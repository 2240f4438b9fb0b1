"""Derivatives, autocast, adapters, offloaded weights and replaced activations around experts that moe-core runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from moe_core.errors import InputError, UnsupportedModelError
from moe_core.integrations.transformers import NAME, prepare, register
from moe_core.integrations.transformers.beside import prepared_for
from tests.integrations.hf_catalogue import decorated_classes, routed_tokens
from tests.integrations.hf_plain_experts import eager

ENTRIES = {entry.name: entry for entry in decorated_classes()}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


def build(name: str = "Qwen3MoeExperts") -> Any:
    experts = ENTRIES[name].build_experts(torch.float32, seed=1)
    experts.config._experts_implementation = NAME
    return experts


@torch.no_grad()
def assert_serves(experts: nn.Module) -> None:
    routed = routed_tokens(experts, 5, seed=2)
    torch.testing.assert_close(experts(*routed), eager(experts, *routed))


# Derivatives ------------------------------------------------------------------------------------------------


def test_frozen_experts_want_no_gradient() -> None:
    experts = build().requires_grad_(False)
    assert not experts(*routed_tokens(experts, 3, seed=2)).requires_grad
    assert build()(*routed_tokens(experts, 3, seed=2)).requires_grad


@pytest.mark.error_path
@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_through_checkpoints_is_refused(reentrant: bool) -> None:
    experts = build()
    hidden_states, index, weights = routed_tokens(experts, 3, seed=2)
    out = checkpoint(experts, hidden_states.requires_grad_(), index, weights, use_reentrant=reentrant)
    with pytest.raises(InputError, match="inference only"):
        out.sum().backward()


# torch compiles its rules of forward derivatives with a tool of its own that it deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.error_path
@pytest.mark.parametrize("place", [0, 2], ids=["hidden states", "router weights"])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_forward_derivatives_are_refused(place: int, grad_mode: bool) -> None:
    experts = build()
    arguments = list(routed_tokens(experts, 3, seed=2))
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        arguments[place] = forward_ad.make_dual(arguments[place], torch.ones_like(arguments[place]))
        with pytest.raises(InputError, match="no derivative in forward mode"):
            experts(*arguments)


# Autocast ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_tokens_under_autocast(dtype: torch.dtype) -> None:
    """Layers before the experts may hand over either dtype."""
    experts = build()
    hidden_states, index, weights = routed_tokens(experts, 5, seed=2)
    hidden_states = hidden_states.to(dtype)
    expected = eager(experts, hidden_states.float(), index, weights)
    with torch.autocast("cpu", torch.bfloat16):
        found = experts(hidden_states, index, weights)
        assert eager(experts, hidden_states, index, weights).dtype == dtype
    assert found.dtype == dtype
    # The result alone is rounded to bfloat16.
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-5)


# Adapters ---------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2.0


@pytest.mark.error_path
@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_parametrization_is_refused_until_it_is_merged(is_prepared: bool) -> None:
    experts = build()
    if is_prepared:
        assert_serves(experts)
    parametrize.register_parametrization(experts, "down_proj", Doubled())
    with pytest.raises(
        UnsupportedModelError, match=r":\n  parameter down_proj is computed by a parametrization.*\nsel"
    ):
        assert_serves(experts)
    parametrize.remove_parametrizations(experts, "down_proj")
    assert_serves(experts)


@pytest.mark.error_path
def test_a_plain_tensor_is_no_parameter() -> None:
    experts = build()
    weight = experts.down_proj.detach()
    del experts.down_proj
    experts.down_proj = weight
    with pytest.raises(UnsupportedModelError, match="down_proj is a plain tensor"):
        prepare(experts)


# What is replaced -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_weights_that_are_offloaded_are_let_go() -> None:
    """As hooks do it: parameters are put into the module before each forward and taken out after it."""
    experts = build()
    stored = {name: parameter.detach().clone() for name, parameter in experts.named_parameters()}
    routed = routed_tokens(experts, 5, seed=2)
    expected = eager(experts, *routed)
    prepare(experts, runner_backend="torch.masked")
    for _ in range(2):
        for name, values in stored.items():
            experts._parameters[name] = nn.Parameter(values.clone())
        brought = [StorageWeakRef(parameter.untyped_storage()) for parameter in experts.parameters()]
        torch.testing.assert_close(experts(*routed), expected)
        # Pins are kept.
        assert prepared_for(experts, (2, torch.float32)).plan.routes[0].runner.spec.short_name == "torch.masked"
        assert not any(storage.expired() for storage in brought)
        for name, values in stored.items():
            experts._parameters[name] = nn.Parameter(torch.empty_like(values, device="meta"))
        assert all(storage.expired() for storage in brought)


def test_a_replaced_activation_is_seen() -> None:
    experts = build()
    assert_serves(experts)
    experts.act_fn = nn.Tanh()
    assert_serves(experts)
    experts.act_fn = nn.ReLU()
    assert_serves(experts)
