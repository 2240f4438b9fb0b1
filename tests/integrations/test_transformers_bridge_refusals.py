"""What the bridge refuses, each time with the class and the trait, and how it registers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_core.bound import BoundExperts
from moe_core.environment import PRESETS
from moe_core.errors import InputError, PluginConflictError, PluginError, ResolutionError, UnsupportedModelError
from moe_core.integrations.transformers import NAME, prepare, register
from moe_core.manager import BackendManager
from tests.integrations.hf_catalogue import DecoratedClass, decorated_classes
from tests.integrations.hf_plain_experts import OwnGate, PlainExperts, TinyConfig, decorate, eager, tiny_tokens

MIXTRAL: DecoratedClass = next(entry for entry in decorated_classes() if entry.name == "MixtralExperts")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


class RouterDependentGate(PlainExperts):
    def _apply_gate(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.activated(rows) * weights


class ExtraArgument(PlainExperts):
    def forward(self, hidden_states: Any, ids: Any, weights: Any, scale: Any = 1.0) -> torch.Tensor:
        return super().forward(hidden_states, ids, weights) * scale


class ExtraParameter(PlainExperts):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.expert_scale = nn.Parameter(torch.ones(4))


class ExtraBuffer(PlainExperts):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.register_buffer("shift", torch.ones(8))


class ExtraSubmodule(PlainExperts):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.pre_norm = nn.LayerNorm(8)


class TrainingDropout(PlainExperts):
    """Not seen before somebody trains."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(0.1)


class OtherNames(PlainExperts):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.w1 = self.gate_up_proj
        del self.gate_up_proj


class OtherShape(PlainExperts):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.gate_up_proj = nn.Parameter(self.gate_up_proj.detach().mT.contiguous())


class Float64(PlainExperts):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.double()


class WeightOnInput(PlainExperts):
    """Nothing but its forward tells that the router weight comes first."""

    def forward(self, hidden_states: Any, ids: Any, weights: Any) -> torch.Tensor:
        slots = [super(WeightOnInput, self).forward(hidden_states * w, i, w / w) for i, w in _columns(ids, weights)]
        return sum(slots[1:], slots[0])


class UnusedGate(PlainExperts):
    """Its forward does not do what its gate says."""

    def activated(self, rows: torch.Tensor) -> torch.Tensor:
        return super().activated(rows.clamp(max=0.5))

    def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
        return PlainExperts.activated(self, rows)


def _columns(ids: torch.Tensor, weights: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((ids[:, k : k + 1], weights[:, k : k + 1]) for k in range(ids.shape[1]))


REFUSED = {
    RouterDependentGate: r"_apply_gate takes \(rows.*weights",
    ExtraArgument: r"its forward takes \(.*scale",
    ExtraParameter: r"unknown parameter expert_scale \[4\]",
    ExtraBuffer: "unknown buffer shift",
    ExtraSubmodule: r"unknown state pre_norm\.weight",
    TrainingDropout: r"unknown submodule dropout \(Dropout\)",
    OtherNames: r"parameter gate_up_proj is missing\n.*unknown parameter w1",
    OtherShape: r"w13: expected \[4, 12, 8\].*got \[4, 8, 12\]",
    Float64: "parameter down_proj is torch.float64",
    WeightOnInput: "computes something else than its flags say",
    UnusedGate: "computes something else than its flags say",
}


@pytest.mark.parametrize(("experts_class", "kind"), [(PlainExperts, "silu"), (OwnGate, "module")])
def test_experts_of_other_libraries_are_served(experts_class: type[nn.Module], kind: str) -> None:
    experts = decorate(experts_class)
    with torch.no_grad():
        torch.testing.assert_close(experts(*tiny_tokens()), eager(experts, *tiny_tokens()))
    assert prepare(experts)[""].plan.request.activation.kind == kind


@pytest.mark.error_path
@pytest.mark.parametrize("experts_class", REFUSED, ids=lambda experts_class: experts_class.__name__)
def test_unknown_traits_are_refused(experts_class: type[nn.Module]) -> None:
    for use in (prepare, lambda experts: experts(*tiny_tokens())):
        with pytest.raises(UnsupportedModelError, match=f"(?s){experts_class.__name__}.*{REFUSED[experts_class]}"):
            use(decorate(experts_class))


@pytest.mark.error_path
def test_weights_that_are_not_loaded_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="meta device; load the weights first"):
        prepare(MIXTRAL.build_experts(torch.float32, seed=1).to("meta"))


@pytest.mark.error_path
def test_model_without_experts_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear has no experts module"):
        prepare(nn.Linear(2, 2))


@pytest.mark.error_path
def test_environment_must_be_that_of_the_parameters() -> None:
    with pytest.raises(InputError, match=r"preset h100.*'cuda'.*'cpu'"):
        prepare(decorate(PlainExperts), environment=PRESETS["h100"])
    assert prepare(decorate(PlainExperts), environment=PRESETS["cpu"])[""].decision.environment is PRESETS["cpu"]


@pytest.mark.error_path
def test_no_backend_is_an_error_with_reasons() -> None:
    with pytest.raises(ResolutionError, match="no backend combination fits"):
        prepare(decorate(PlainExperts), manager=BackendManager())


def test_register_twice_changes_nothing_and_both_registries_know_the_name() -> None:
    before = [registry[NAME] for registry in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS)]
    register()
    assert [registry[NAME] for registry in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS)] == before
    assert all(callable(function) for function in before)


@pytest.mark.error_path
@pytest.mark.parametrize("registry", [ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS], ids=lambda r: type(r).__name__)
def test_a_taken_name_is_refused(registry: Any) -> None:
    def theirs() -> None: ...

    registry[NAME] = theirs
    try:
        with pytest.raises(PluginConflictError, match=rf"{type(registry).__name__}.*{NAME}.*theirs"):
            register()
    finally:
        del registry[NAME]


@pytest.mark.error_path
@pytest.mark.parametrize(("version", "is_old"), [("5.6.2", True), ("4.57.1", True), ("5.7.0.dev0", False)])
def test_old_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str, is_old: bool) -> None:
    # transformers replaces its own entry there, so that a name bound earlier may mean another object.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    if is_old:
        with pytest.raises(PluginError, match=rf"version: needs transformers >= 5\.7, found transformers {version}"):
            register()
    else:
        register()


@pytest.mark.error_path
def test_missing_transformers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PluginError, match=r"package: needs transformers >= 5\.7.*'moe-core\[transformers\]'"):
        register()


FAULTS: dict[str, tuple[Any, str]] = {
    "nothing": (lambda out: None, "NoneType"),
    "shape": (lambda out: out[:-1], r"\[5, 8\] float32 on cpu"),
    "dtype": (lambda out: out.bfloat16(), r"\[6, 8\] bfloat16 on cpu"),
    "device": (lambda out: out.to("meta"), r"\[6, 8\] float32 on meta"),
}


@pytest.mark.error_path
@pytest.mark.parametrize("fault", FAULTS)
def test_a_form_that_is_wrong_at_many_tokens_alone_names_the_plugin(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, found = FAULTS[fault]
    experts = prepare(decorate(PlainExperts))[""]
    run = experts.bound._run

    def spoilt(*tokens: Any) -> Any:
        # Two tokens were compared with eager; each has two rows here.
        return spoil(run(*tokens)) if len(tokens[0]) > 4 else run(*tokens)

    monkeypatch.setattr(experts.bound, "_run", spoilt)
    experts(*(tensor[:2] for tensor in tiny_tokens()))
    expected = rf"expected \[6, 8\] float32 on cpu as the tokens are, got {found}, of plugin 'torch' \(moe-core "
    with pytest.raises(PluginError, match=rf"torch:torch.*{expected}.*; moe-core verify torch tells"):
        experts(*tiny_tokens())


@pytest.mark.error_path
@pytest.mark.parametrize("position", [0, 2])
def test_a_forward_that_writes_to_its_tokens_is_refused(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = BoundExperts._run

    def writing(self: BoundExperts, *arguments: Any) -> torch.Tensor:
        out = run(self, *arguments)
        arguments[position].zero_()
        return out

    monkeypatch.setattr(BoundExperts, "_run", writing)
    with pytest.raises(PluginError, match=r"torch:torch\.standard.* wrote to its tokens or their weights"):
        prepare(MIXTRAL.build_experts(torch.float32, seed=1))
