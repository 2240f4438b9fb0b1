"""Every experts class of the installed transformers through `experts_implementation="moe_core"`, beside `eager`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_core.integrations.transformers import NAME, prepare, register
from moe_core.integrations.transformers.bridge import experts_forward
from tests.integrations.hf_catalogue import DecoratedClass, decorated_classes, routed_tokens, run_two_steps

CLASSES = [pytest.param(entry, id=entry.name) for entry in decorated_classes()]

# Largest difference over largest value. float32: both sum the same products, at most in another order. bfloat16:
# `eager` rounds after each of about six steps at 2^-9 each, the backend less often.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


@contextmanager
def zeros_instead() -> Iterator[None]:
    """Under the same name, a function that answers zeros: what does not change then never came through the name."""
    ALL_EXPERTS_FUNCTIONS[NAME] = lambda self, hidden_states, *routing: torch.zeros_like(hidden_states)
    try:
        yield
    finally:
        del ALL_EXPERTS_FUNCTIONS[NAME]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("entry", CLASSES)
@torch.no_grad()
def test_module_computes_what_eager_computes(entry: DecoratedClass, dtype: torch.dtype) -> None:
    experts = entry.build_experts(dtype, seed=11)
    names = [*(name for name, _ in experts.named_parameters()), *experts.state_dict()]

    # Prefill and decode; routers of half-precision models hand over weights of either dtype; several top-k.
    cases = ((7, 2, torch.float32), (1, 2, dtype), (5, 3, dtype), (4, 1, torch.float32))
    for num_tokens, top_k, weights_dtype in cases:
        routed = routed_tokens(experts, num_tokens, 12, weights_dtype, top_k)
        experts.config._experts_implementation = "eager"
        expected = experts(*routed)
        experts.config._experts_implementation = NAME
        found = experts(*routed)
        with zeros_instead():
            assert not experts(*routed).any()

        assert found.dtype == routed.hidden_states.dtype
        assert relative_error(found, expected) <= TOLERANCE[dtype]
    assert [*(name for name, _ in experts.named_parameters()), *experts.state_dict()] == names


@pytest.mark.parametrize("entry", CLASSES)
@torch.no_grad()
def test_model_computes_what_eager_computes(entry: DecoratedClass) -> None:
    model = entry.build_model(seed=13)
    input_ids = torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(14))
    eager = run_two_steps(model, input_ids)
    tokens = generated(model, input_ids)

    model.set_experts_implementation(NAME)
    prepared = prepare(model)
    steps = run_two_steps(model, input_ids)

    assert set(prepared) == set(entry.experts_in(model)) != set()
    for found, expected in zip(steps, eager, strict=True):
        assert relative_error(found, expected) <= TOLERANCE[torch.float32]
    assert torch.equal(generated(model, input_ids), tokens)
    with zeros_instead():
        for found, expected in zip(run_two_steps(model, input_ids), eager, strict=True):
            assert relative_error(found, expected) > 1e-2


# The router of Inkling2 stays in float32: the model around its experts does not run in bfloat16.
@pytest.mark.parametrize("entry", [case for case in CLASSES if not str(case.id).startswith("Inkling2")])
@torch.no_grad()
def test_layers_of_a_bfloat16_model_compute_what_eager_computes(entry: DecoratedClass) -> None:
    """Layer by layer on the tokens of the eager model: logits would tell where rounding turns the routing instead."""
    model = entry.build_model(seed=13).to(torch.bfloat16)
    input_ids = torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(14))
    errors = []

    def compare(experts: torch.nn.Module, routed: tuple[torch.Tensor, ...], expected: torch.Tensor) -> None:
        errors.append(relative_error(experts_forward(experts, *routed), expected))

    for experts in entry.experts_in(model).values():
        experts.register_forward_hook(compare)
    run_two_steps(model, input_ids)

    assert max(errors) <= TOLERANCE[torch.bfloat16]


def generated(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Six greedy tokens of a model that generates text from ids alone, else nothing."""
    if not model.can_generate() or hasattr(model, "codec_embedding"):
        return input_ids
    return model.generate(input_ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
