"""Measured times that the bridge is given decide, for models of floats and for quantized ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layers import exact, random_tensors, random_tokens
from measured import measured
from oracle import TOLERANCE, relative_error
from triton_layers import DEVICE, both_manager

from moe_core.activation import SWIGLU
from moe_core.environment import load_environment
from moe_core.errors import InputError
from moe_core.integrations.transformers import NAME, load_model, prepare, register
from moe_core.integrations.transformers.layout import ExpertsLayout
from moe_core.integrations.transformers.prepared import PreparedExperts, Preparer
from moe_core.integrations.transformers.quantized_experts import QuantizedExperts
from moe_core.integrations.transformers.traits import Flags
from moe_core.measurements import MeasurementTable
from moe_core.payloads import RawWeights
from moe_core.quant import BF16, LayerQuant
from tests.integrations.hf_catalogue import decorated_classes
from tests.integrations.hf_quantized import MODULES

USUAL, OTHER = "torch:none.standard + torch:torch.standard", "torch:none.masked + torch:torch.masked"


def faster_elsewhere(prepared: PreparedExperts) -> MeasurementTable:
    """Times of a layer's shape in which the combination that no tier ranks first wins, from one token on."""
    times = {USUAL: {1: 90.0, 4096: 90.0}, OTHER: {1: 10.0, 4096: 10.0}}
    return measured(prepared.plan.request, times, source="by hand")


def names(prepared: PreparedExperts) -> set[str]:
    return {route.candidate.full_name for route in prepared.plan.routes}


def test_a_model_of_floats() -> None:
    model = next(entry for entry in decorated_classes() if entry.name.startswith("Qwen3Moe")).build_model(seed=1)
    register()
    model.set_experts_implementation(NAME)
    (usual, *_) = prepare(model, measurements=MeasurementTable()).values()
    assert names(usual) == {USUAL}
    (found, *_) = prepare(model, measurements=faster_elsewhere(usual)).values()
    assert OTHER in names(found)
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.int64))
    assert "by hand" in found.decision.explain()


EXPERTS = ExpertsLayout(
    flags=Flags(is_transposed=False, has_bias=False),
    num_experts=4,
    hidden_size=128,
    intermediate_size=128,
    dtype="bf16",
    quant=LayerQuant.of(BF16),
    device_type="cuda",
    activation=SWIGLU,
)


def preparer_for_panels() -> Preparer:
    """On an H200 where panels were measured to be faster, at two experts per token alone."""
    times = {"triton:triton.fused": {1: 90.0, 4096: 90.0}, "triton:triton.fused_panels": {1: 60.0, 4096: 60.0}}
    return Preparer(
        manager=both_manager(),
        environment=load_environment("h200"),
        measurements=measured(EXPERTS.request(2), times, arch="sm90"),
    )


@pytest.mark.parametrize(("keeps_weights", "layout"), [(True, "canonical"), (False, "triton_panels")])
def test_no_time_makes_a_model_hold_its_weights_twice(keeps_weights: bool, layout: str) -> None:
    plan, _ = preparer_for_panels().plan(EXPERTS, 2, keeps_weights=keeps_weights)
    assert plan.weight_layout == layout


def test_weights_that_exist_once_serve_other_numbers_of_experts_per_token() -> None:
    pytest.importorskip("triton", reason="needs triton")
    request = EXPERTS.request(2)
    tensors, tokens = random_tensors(request), random_tokens(EXPERTS.request(1), 5)
    original = torch.nn.Module()
    original.config = None
    served = QuantizedExperts(original, EXPERTS, preparer_for_panels(), 2)
    served.load(RawWeights(tensors={name: tensor.to(DEVICE) for name, tensor in tensors.items()}))
    assert served.prepared.plan.weight_layout == "triton_panels"
    output = served(*(tensor.to(DEVICE) for tensor in tokens)).cpu()
    assert relative_error(output, exact(request, tensors, tokens)) < TOLERANCE[torch.bfloat16]


def test_a_quantized_model(written: Path) -> None:
    usual = load_model(written, measurements=MeasurementTable())
    assert names(usual.experts[MODULES[0]]) == {USUAL}
    table = faster_elsewhere(usual.experts[MODULES[0]])
    loaded = load_model(written, measurements=table)
    assert OTHER in names(loaded.experts[MODULES[0]])


@pytest.mark.error_path
def test_experts_that_were_loaded_take_none(written: Path) -> None:
    loaded = load_model(written)
    with pytest.raises(InputError, match="give pins, environment and measured times to load_model"):
        prepare(loaded.model, measurements=MeasurementTable())
