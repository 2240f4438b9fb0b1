"""The catalogue is complete, and every experts module computes what its flags say.

The flags are proven against a loop in float64 that is written from them alone: a layout, bias, gate or norm that a flag
does not tell would show as a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tests.integrations.hf_catalogue import DecoratedClass, Routed, decorated_classes, routed_tokens, run_two_steps

CLASSES = [pytest.param(entry, id=entry.name) for entry in decorated_classes()]

# Largest difference over largest value. float32: sums of at most 64 terms, rounded at 2^-24 each; some gates work in it
# whatever they get. bfloat16: `eager` rounds after each of about six steps, at 2^-9 each.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def expert_float64(experts: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """One expert on `[n, H]` rows, by the module's flags; only gate, activation and norm are the module's own code."""

    def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(experts, name)[expert].double()
        out: torch.Tensor = rows @ (weight if experts.is_transposed else weight.T)
        return out + getattr(experts, f"{name}_bias")[expert].double() if experts.has_bias else out

    if experts.has_gate:
        activated = experts._apply_gate(linear(rows, "gate_up_proj"))
    else:
        activated = experts.act_fn(linear(rows, "up_proj"))
    out = linear(activated.double(), "down_proj")
    if getattr(experts, "has_post_expert_norm", False):
        out = experts.post_expert_norm(out)
    return out


@torch.no_grad()
def experts_float64(experts: Any, routed: Routed) -> torch.Tensor:
    out = torch.zeros_like(routed.hidden_states, dtype=torch.float64)
    for token, ids in enumerate(routed.top_k_index.tolist()):
        for slot, expert in enumerate(ids):
            row = expert_float64(experts, expert, routed.hidden_states[token : token + 1].double())[0]
            out[token] += routed.top_k_weights[token, slot].double() * row
    return out


def test_every_decorator_in_the_sources_has_an_entry() -> None:
    root = Path(transformers.__file__).parent
    lines = (line for path in root.glob("models/*/modeling_*.py") for line in path.read_text("utf-8").splitlines())
    count = sum(line.startswith("@use_experts_implementation") for line in lines)

    assert len({(entry.module_name, entry.name) for entry in decorated_classes()}) == len(CLASSES) == count
    known = {"5.17.0": 55, "5.24.0": 68}
    assert count == known.get(transformers.__version__, count)


# Routers of bfloat16 models hand over weights of either dtype.
@pytest.mark.parametrize(
    ("dtype", "weights_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("entry", CLASSES)
def test_eager_is_what_the_flags_say(entry: DecoratedClass, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    experts = entry.build_experts(dtype, seed=1)

    for num_tokens in (7, 1):
        routed = routed_tokens(experts, num_tokens, seed=2, weights_dtype=weights_dtype)
        with torch.no_grad():
            found = experts(*routed)
        expected = experts_float64(experts, routed)

        assert found.dtype == dtype
        assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("entry", CLASSES)
def test_gate_joins_the_columns_that_the_flag_says(entry: DecoratedClass) -> None:
    """Output j of the gate depends on two inputs: j and I + j, or 2j and 2j + 1 where gate and up alternate."""
    experts: Any = entry.build_experts(torch.float32, seed=3)
    if not experts.has_gate:
        assert not hasattr(experts, "gate_up_proj")
        return

    width = experts.down_proj.shape[1 if experts.is_transposed else 2]
    # Small inputs, so that no clamp cuts a dependency; none is zero.
    gate_up = torch.rand(2 * width, generator=torch.Generator().manual_seed(4)) + 0.1
    depends = torch.autograd.functional.jacobian(experts._apply_gate, gate_up) != 0  # type: ignore[no-untyped-call]

    columns = torch.arange(width)
    pairs = (columns, columns + width) if experts.is_concatenated else (2 * columns, 2 * columns + 1)
    expected = torch.zeros(width, 2 * width, dtype=torch.bool)
    for side in pairs:
        expected[columns, side] = True
    assert torch.equal(depends, expected)


@pytest.fixture
def calls() -> Iterator[list[tuple[torch.nn.Module, int]]]:
    """Calls of an experts function named `recorded`, which answers zeros: (module, tokens)."""
    seen: list[tuple[torch.nn.Module, int]] = []

    def recorded(
        self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        assert top_k_index.shape == top_k_weights.shape
        assert top_k_index.dtype == torch.int64
        seen.append((self, hidden_states.shape[0]))
        return torch.zeros_like(hidden_states)

    # A local entry of the object that the decorated classes use: unlike `register`, it can be taken back.
    ALL_EXPERTS_FUNCTIONS["recorded"] = recorded
    yield seen
    del ALL_EXPERTS_FUNCTIONS["recorded"]


@pytest.mark.parametrize("entry", CLASSES)
def test_model_sends_both_steps_through_the_named_function(
    entry: DecoratedClass, calls: list[tuple[torch.nn.Module, int]]
) -> None:
    model = entry.build_model(seed=5)
    assert model is not None
    input_ids = torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(6))

    eager = run_two_steps(model, input_ids)
    assert not calls
    model.set_experts_implementation("recorded")
    zeroed = run_two_steps(model, input_ids)

    # Text reaches no vision experts, where a layer has both.
    modules = [module for name, module in entry.experts_in(model).items() if "vision" not in name]
    assert {module for module, _ in calls} == set(modules)
    assert [tokens for _, tokens in calls].count(2) == len(modules)  # the decode step: one token of each sequence
    for with_experts, without in zip(eager, zeroed, strict=True):
        assert with_experts.isfinite().all()
        # A step that the experts did not reach would answer the same; far above rounding (1e-6).
        assert (with_experts - without).abs().max() > 1e-2 * with_experts.abs().max()
