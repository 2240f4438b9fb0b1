"""`torch.compile` over experts that moe-core runs: whole graphs, weights that change, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_core.errors import InputError, UnsupportedModelError
from moe_core.integrations.transformers import NAME, load_model, prepare, register
from moe_core.integrations.transformers.traced import HAS_WHOLE_GRAPHS
from tests.integrations import hf_fp8_experts
from tests.integrations.hf_catalogue import decorated_classes, routed_tokens
from tests.integrations.hf_plain_experts import eager
from tests.integrations.hf_quantized import HIDDEN, MODULES

ENTRIES = {entry.name: entry for entry in decorated_classes()}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def build(name: str = "Qwen3MoeExperts", seed: int = 1) -> Any:
    experts = ENTRIES[name].build_experts(torch.float32, seed)
    experts.config._experts_implementation = NAME
    return experts


def compiled(function: Any) -> Callable[..., torch.Tensor]:
    """As a whole graph where torch has them over these experts."""
    found: Callable[..., torch.Tensor] = torch.compile(function, fullgraph=HAS_WHOLE_GRAPHS, backend="aot_eager")
    return found


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"])
@torch.no_grad()
def test_a_whole_graph_follows_the_weights(name: str, is_prepared: bool) -> None:
    experts = build(name)
    if is_prepared:
        prepare(experts)
    run = compiled(experts)

    def assert_serves(num_tokens: int) -> None:
        routed = routed_tokens(experts, num_tokens, seed=2)
        torch.testing.assert_close(run(*routed), eager(experts, *routed))

    assert_serves(6)
    assert_serves(1)
    experts.down_proj.mul_(-2.0)
    assert_serves(6)
    experts.down_proj = nn.Parameter(experts.down_proj * 3.0)
    assert_serves(6)
    experts.load_state_dict(build(name, seed=5).state_dict(), assign=True)
    assert_serves(6)


@torch.no_grad()
def test_one_compiled_function_for_several_modules() -> None:
    run, modules = compiled(lambda module, *routed: module(*routed)), [build(seed=seed) for seed in range(3)]
    for experts in (*modules, modules[0]):
        routed = routed_tokens(experts, 4, seed=2)
        torch.testing.assert_close(run(experts, *routed), eager(experts, *routed))


@torch.no_grad()
def test_a_whole_model() -> None:
    model = ENTRIES["MixtralExperts"].build_model(seed=3)
    input_ids = torch.arange(3, 11)[None]
    expected = model(input_ids, use_cache=False).logits
    model.set_experts_implementation(NAME)
    found = compiled(model)(input_ids, use_cache=False).logits  # type: ignore[attr-defined]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("inside", [False, True])
@torch.no_grad()
def test_tokens_that_autocast_lowered(inside: bool) -> None:
    experts = build()
    hidden_states, index, weights = routed_tokens(experts, 4, seed=2)
    lowered = hidden_states.bfloat16()

    def served(*routed: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out: torch.Tensor = experts(*routed)
            return out

    run = compiled(served if inside else experts)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(lowered, index, weights), experts(lowered, index, weights), rtol=0, atol=0)
        torch.testing.assert_close(run(hidden_states, index, weights), experts(hidden_states, index, weights))


@torch.no_grad()
def test_fp8_experts() -> None:
    experts = hf_fp8_experts.build(block_size=(128, 128))
    routed = hf_fp8_experts.tokens(5, 256, torch.bfloat16)
    torch.testing.assert_close(compiled(experts)(*routed), experts(*routed), rtol=0, atol=0)


@torch.no_grad()
def test_experts_of_a_quantized_checkpoint(written: Path) -> None:
    experts = load_model(written).model.get_submodule(MODULES[0])
    hidden_states, index, weights = torch.randn(5, HIDDEN), torch.tensor([[0, 3]] * 5), torch.full((5, 2), 0.5)
    expected = experts(hidden_states, index, weights)
    torch.testing.assert_close(compiled(experts)(hidden_states, index, weights), expected)


@pytest.mark.error_path
@pytest.mark.parametrize("wanted", ["hidden states", "router weights", "weights"])
def test_backward_is_refused_and_the_forward_is_not(wanted: str) -> None:
    experts = build().requires_grad_(wanted == "weights")
    hidden_states, index, weights = routed_tokens(experts, 4, seed=2)
    hidden_states.requires_grad_(wanted == "hidden states")
    weights.requires_grad_(wanted == "router weights")
    out = compiled(experts)(hidden_states, index, weights)
    torch.testing.assert_close(out.detach(), eager(experts, hidden_states, index, weights))
    with pytest.raises(InputError, match="inference only"):
        out.sum().backward()


@pytest.mark.error_path
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_derivative_in_forward_mode_is_refused() -> None:
    experts = build()
    hidden_states, *routed = routed_tokens(experts, 4, seed=2)
    run = compiled(lambda tokens: torch.func.jvp(lambda x: experts(x, *routed), (tokens,), (tokens,))[1])
    # A whole graph tells of the error in its own words.
    with pytest.raises(Exception, match="inference only"):
        run(hidden_states)


@pytest.mark.error_path
@pytest.mark.skipif(not HAS_WHOLE_GRAPHS, reason="between two graphs the module has the parameters of the call")
def test_parameters_of_another_call_are_refused() -> None:
    experts = build()
    routed = routed_tokens(experts, 4, seed=2)
    others = {name: parameter.detach() * 2.0 for name, parameter in experts.named_parameters()}
    with torch.no_grad(), pytest.raises(InputError, match="other parameters than the module has"):
        compiled(lambda *arguments: torch.func.functional_call(experts, others, arguments))(*routed)


@pytest.mark.error_path
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make_program", [torch.export.export, torch.jit.trace], ids=lambda tool: tool.__name__)
@torch.no_grad()
def test_programs_that_outlive_the_module_are_refused(make_program: Callable[..., object]) -> None:
    experts = build()
    routed = routed_tokens(experts, 4, seed=2)
    with pytest.raises(UnsupportedModelError, match="cannot be exported or traced"):
        make_program(experts, tuple(routed))
