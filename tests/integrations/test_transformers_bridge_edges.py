"""Arguments at the edge of the contract, parameters that change, and what is kept beside a module."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.activations import ACT2FN

from moe_core.backends.torch import plugin as torch_plugin
from moe_core.errors import InputError
from moe_core.integrations.transformers import NAME, PreparedExperts, prepare, register
from moe_core.manager import BackendManager
from tests.integrations.hf_catalogue import decorated_classes, routed_tokens
from tests.integrations.hf_plain_experts import OwnGate, decorate, eager

ENTRIES = {entry.name: entry for entry in decorated_classes()}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


def build(name: str = "Qwen3MoeExperts", dtype: torch.dtype = torch.float32, seed: int = 1) -> nn.Module:
    experts = ENTRIES[name].build_experts(dtype, seed)
    experts.config._experts_implementation = NAME
    return experts


def assert_serves(experts: nn.Module, seed: int = 2) -> None:
    routed = routed_tokens(experts, 5, seed)
    with torch.no_grad():
        torch.testing.assert_close(experts(*routed), eager(experts, *routed))


# Arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off_rank", [8, 9, 1000, -1, -2], ids="id {}".format)
@torch.no_grad()
def test_ids_out_of_range_contribute_nothing(off_rank: int) -> None:
    experts = build()
    hidden_states, index, weights = routed_tokens(experts, 6, seed=3)
    assert experts.num_experts == 8
    marked = index.clone()
    marked[0] = marked[1:4, 1] = off_rank
    poisoned = weights.masked_fill(marked == off_rank, float("nan"))

    found = experts(hidden_states, marked, poisoned)

    expected = eager(experts, hidden_states, index, weights.masked_fill(marked == off_rank, 0.0))
    torch.testing.assert_close(found, expected)
    assert not found[0].any()
    assert marked[0, 0] == off_rank  # the caller's tensor


@torch.no_grad()
def test_more_slots_than_experts_of_this_rank() -> None:
    """An expert-parallel rank may hold fewer experts than a token has slots."""
    experts = build("MixtralExperts")
    hidden_states, _, _ = routed_tokens(experts, 3, seed=3)
    index = torch.full((3, 11), experts.num_experts)
    index[0, 4], index[1, 10], index[1, 2] = 1, 7, 3
    weights = torch.rand(3, 11, generator=torch.Generator().manual_seed(4)) + 0.5

    found = experts(hidden_states, index, weights)

    # Not every version's own forward knows the marker.
    marked = index == experts.num_experts
    expected = eager(experts, hidden_states, index.masked_fill(marked, 0), weights.masked_fill(marked, 0.0))
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_no_tokens() -> None:
    experts = build()
    assert experts(*routed_tokens(experts, 0, seed=3)).shape == (0, experts.hidden_dim)


@pytest.mark.error_path
def test_tokens_of_another_dtype_are_refused() -> None:
    experts = build(dtype=torch.bfloat16)
    hidden_states, index, weights = routed_tokens(experts, 2, seed=3)
    with pytest.raises(InputError, match=r"expected torch\.bfloat16, got torch\.float32"):
        experts(hidden_states.float(), index, weights)


@pytest.mark.error_path
@pytest.mark.parametrize("wanted", ["hidden_states", "weights of the experts"])
def test_backward_is_refused(wanted: str) -> None:
    experts = build()
    hidden_states, index, weights = routed_tokens(experts, 2, seed=3)
    out = experts(hidden_states.requires_grad_(wanted == "hidden_states"), index, weights)
    with pytest.raises(InputError, match="inference only"):
        out.sum().backward()


# Parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"])
def test_prepared_tensors_are_the_parameters(name: str) -> None:
    experts = build(name)
    prepared = prepare(experts)[""]
    assert {t.data.data_ptr() for t in prepared.bound.weights.tensors.values()} == {
        parameter.data_ptr() for parameter in experts.parameters()
    }
    assert not any(tensor.owned for tensor in prepared.bound.weights.tensors.values())


def write_in_place(experts: nn.Module) -> nn.Module:
    with torch.no_grad():
        experts.down_proj.mul_(-2.0)
    return experts


def write_through_data(experts: nn.Module) -> nn.Module:
    experts.down_proj.data.mul_(-2.0)
    return experts


def load_in_place(experts: nn.Module) -> nn.Module:
    experts.load_state_dict(build(seed=9).state_dict())
    return experts


def load_assigned(experts: nn.Module) -> nn.Module:
    experts.load_state_dict(build(seed=9).state_dict(), assign=True)
    return experts


def assign_parameter(experts: nn.Module) -> nn.Module:
    experts.down_proj = nn.Parameter(experts.down_proj.detach() * -2.0)
    return experts


def assign_data(experts: nn.Module) -> nn.Module:
    experts.gate_up_proj.data = experts.gate_up_proj.data.flip(0).clone()
    return experts


def cast(experts: nn.Module) -> nn.Module:
    return experts.to(torch.float16).to(torch.float32)


CHANGES = [write_in_place, write_through_data, load_in_place, load_assigned, assign_parameter, assign_data, cast]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_parameters_are_seen(change: Callable[[nn.Module], nn.Module]) -> None:
    experts = build()
    assert_serves(experts)
    assert_serves(change(experts))


def test_dtype_follows_the_parameters() -> None:
    experts = build()
    assert prepare(experts)[""].plan.request.dtype == "fp32"
    experts.to(torch.bfloat16)
    routed = routed_tokens(experts, 5, seed=2)
    with torch.no_grad():
        found, expected = experts(*routed), eager(experts, *routed)
    # eager rounds each of about six steps to bfloat16.
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() <= 1.5e-2 * expected.abs().max()


@pytest.fixture
def copying_manager() -> BackendManager:
    """The torch plugin, except that its prepared weights are copies of its own."""
    module = types.ModuleType("copying")
    vars(module).update({name: value for name, value in vars(torch_plugin).items() if not name.startswith("__")})

    @torch_plugin.hookimpl
    def process_weights_after_loading(plan: Any, weights: Any, out: Any) -> Any:
        prepared = torch_plugin.process_weights_after_loading(plan, weights, out)
        for tensor in prepared.tensors.values():
            tensor.data, tensor.owned = tensor.data.clone(), True
        return prepared

    module.process_weights_after_loading = process_weights_after_loading  # type: ignore[attr-defined]
    manager = BackendManager()
    manager.register("torch", module)
    return manager


@pytest.mark.parametrize("change", [write_in_place, load_in_place, load_assigned, cast], ids=lambda c: c.__name__)
def test_changed_parameters_are_copied_again(
    change: Callable[[nn.Module], nn.Module], copying_manager: BackendManager
) -> None:
    experts = build()
    prepare(experts, manager=copying_manager)
    assert_serves(experts)
    assert_serves(change(experts))


# Beside the module ------------------------------------------------------------------------------------------


def test_every_top_k_has_a_plan_over_the_same_weights() -> None:
    experts = build()
    first = prepare(experts)[""]
    with torch.no_grad():
        experts(*routed_tokens(experts, 3, seed=2, top_k=5))
    assert first.plan.request.top_k == experts.config.num_experts_per_tok
    assert_serves(experts)


def test_what_is_kept_goes_with_the_module() -> None:
    experts = decorate(OwnGate)
    prepared = weakref.ref(prepare(experts)[""])
    assert prepared() is not None
    module, parameter = weakref.ref(experts), weakref.ref(experts.down_proj)
    del experts
    gc.collect()
    assert (module(), parameter(), prepared()) == (None, None, None)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_stand_on_their_own(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    experts = build()
    assert_serves(experts)
    other = duplicate(experts)
    write_in_place(other)
    assert_serves(other)
    assert_serves(experts)


def test_model_saves_and_loads_as_ever(tmp_path: Path) -> None:
    model = ENTRIES["MixtralExperts"].build_model(seed=1)
    model.set_experts_implementation(NAME)
    names = set(model.state_dict())
    prepare(model)
    model.save_pretrained(tmp_path)
    assert set(model.state_dict()) == names

    loaded = type(model).from_pretrained(tmp_path, experts_implementation=NAME)
    input_ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids).logits, model(input_ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 8])
def test_any_number_of_experts_per_token(top_k: int) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=top_k,
    )
    model, ids = Qwen3MoeForCausalLM(config).eval(), torch.arange(7)[None]
    with torch.no_grad():
        model.set_experts_implementation("eager")
        want = model(ids).logits
        model.set_experts_implementation(NAME)
        (prepared,) = prepare(model).values()
        assert (model(ids).logits - want).abs().max() <= 2e-5 * want.abs().max()
    assert prepared.plan.request.top_k == top_k
    assert len(repr(prepared)) < 300


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "NemotronHExperts"])
@pytest.mark.parametrize("word", ["gelu", "gelu_pytorch_tanh", "relu", "mish"])
def test_activations_are_told_apart(word: str, name: str) -> None:
    """GELU and its approximation differ by 5e-4, also where no up projection shows it."""
    experts = build(name)
    experts.act_fn = ACT2FN[word]
    assert_serves(experts)
    kinds = {"gelu_pytorch_tanh": "gelu_tanh", "mish": "module"}
    assert prepare(experts)[""].plan.request.activation.kind == kinds.get(word, word)


def test_prepare_names_modules_and_takes_pins() -> None:
    model = ENTRIES["MixtralExperts"].build_model(seed=1)
    model.set_experts_implementation(NAME)
    prepared = prepare(model, runner_backend="torch.masked", a2a_backend="none")
    assert set(prepared) == set(ENTRIES["MixtralExperts"].experts_in(model)) != set()
    for experts in prepared.values():
        assert isinstance(experts, PreparedExperts)
        assert experts.plan.routes[0].runner.spec.short_name == "torch.masked"
        assert experts.decision.is_feasible
        assert experts.bound.plan is experts.plan


def test_prepare_warns_of_a_model_that_goes_on_with_another_implementation() -> None:
    model = ENTRIES["MixtralExperts"].build_model(seed=1)
    model.set_experts_implementation("eager")
    with pytest.warns(UserWarning, match=r"runs its implementation eager: .*set_experts_implementation\('moe_core'\)"):
        assert prepare(model)
