"""Measured times that the bridge is given decide, for models of floats and for quantized ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from measured import measured

from moe_core.errors import InputError
from moe_core.integrations.transformers import NAME, load_model, prepare, register
from moe_core.integrations.transformers.prepared import PreparedExperts
from moe_core.measurements import MeasurementTable
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
